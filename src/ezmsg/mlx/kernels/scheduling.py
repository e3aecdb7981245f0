"""When the state after a message is computed, so that it does not keep the graph of every message before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .contract import Path

if TYPE_CHECKING:
    import mlx.core as mx


def schedule_before(path: Path, *states: mx.array | None) -> None:
    """Start computing the states of the last message, before that of the next is made of them.

    Otherwise they would hold the graph of every message whose output is not read. On CUDA here and not after the
    message, because a kernel makes the state together with the output: where that has been read, this is free.
    """
    if path == "cuda":
        _schedule(states)


def schedule_after(path: Path, *states: mx.array | None, first: bool) -> None:
    """Start computing the states of this message, on the paths on which this is the place for it.

    On CUDA only for the *first* message, so that a transformer can be warmed up in one thread and used in another.
    """
    if path in ("metal", "plain") or (path == "cuda" and first):
        _schedule(states)


def _schedule(states: tuple[mx.array | None, ...]) -> None:
    import mlx.core as mx

    mx.async_eval(*(state for state in states if state is not None))
