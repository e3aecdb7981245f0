"""Workarounds for three defects of ezmsg 3.10.0b5 after which a graph stands still, without an error or with one.

- A receiver stops for good: it follows a publisher to new shared memory in a task to which nothing holds a reference
  (``ChannelProtocol._reattach_shm``), so that a garbage collection may end it.
- A publisher ends: ``Publisher.broadcast`` iterates over the dictionary of its subscribers while it waits for one of
  them, and raises if another one leaves or comes meanwhile.
- A graph does not end: ``SHMContext.wait_closed`` suppresses the cancellation of a producer that waits in it.

What happens, step by step, and a program that shows it stand in the explanation of graphs (``ezmsg-graphs.md``).

All are cured in the class, since there is no public place that every process passes: the receiver may run in a process
with none of this package's units, and a task factory belongs to a loop, which ezmsg makes itself in each process. The
names that ezmsg does not publish are all in this module. Each cure is applied only where the code of the installed
ezmsg has the fault, and none where the environment variable ``EZMSG_MLX_WORKAROUNDS`` is ``0``.

An FFT or a convolution of a new length needs a plan of its own. MLX keeps a fixed number of them and, by default, takes
many misses for an error: ``RuntimeError: Cache thrashing is happening``, from then on at every length that is not
kept, the steady one included (seen at the 257th FFT length on an H200 with MLX 0.32.4). Without that check the plan is
made again, which takes time and loses nothing.

MLX reads the variable that turns the check off with ``getenv`` whenever it makes such a cache: those of FFTs and
convolutions when they are first used, that of graphs with each stream. So it has to be set before MLX is used, and what
is set in Python's ``os.environ`` counts.
"""

from __future__ import annotations

import asyncio
import copyreg
import functools
import inspect
import os
import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import ezmsg.core as ez
from ezmsg.core.backendprocess import DefaultBackendProcess
from ezmsg.core.messagechannel import ChannelProtocol
from ezmsg.core.pubclient import Publisher
from ezmsg.core.shm import SHMContext

_reattaching: set[asyncio.Task | None] = set()


VARIABLE = "EZMSG_MLX_WORKAROUNDS"
"""Environment variable that turns the workarounds for ezmsg off: ``0``. It counts when a unit is first imported."""


def apply_workarounds(environ: Mapping[str, str] = os.environ) -> None:
    """Apply the workarounds that the installed ezmsg needs, to this process and to those that ezmsg starts from it.

    A second call changes nothing.

    Raises:
        ValueError: The environment variable is neither ``0`` nor ``1``.
    """
    wanted = environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise ValueError(f"{VARIABLE!r} must be one of '0', '1', got {wanted!r}")
    if wanted == "0":
        return
    for kind, method, has_fault, cure in _CURES:
        found = getattr(kind, method, None)
        if found is not None and not hasattr(found, "__wrapped__") and has_fault():
            setattr(kind, method, cure(found))
    # A forked process inherits the classes as they are here; a spawned one unpickles this.
    copyreg.pickle(DefaultBackendProcess, _reduce_with_workarounds)


def _loses_reattachment() -> bool:
    """Whether ezmsg starts the task that follows to new memory without keeping it."""
    names = _names_in(ChannelProtocol, "frames_available")
    is_kept = any(name == "add" or ("task" in name and name != "create_task") for name in names)
    return {"create_task", "_reattach_shm"} <= names and not is_kept


def _iterates_while_it_waits() -> bool:
    """Whether ezmsg iterates over a dictionary of subscribers while it waits for one."""
    names = _names_in(Publisher, "broadcast")
    return {"_channels", "values"} <= names and not {"list", "tuple"} & names


def _suppresses_cancellation() -> bool:
    """Whether ezmsg suppresses the cancellation of what waits for closed memory."""
    return "suppress" in _names_in(SHMContext, "wait_closed")


def _names_in(kind: type, method: str) -> set[str]:
    """The global names and attributes that a method uses; none where the class no longer has it."""
    return set(inspect.unwrap(found).__code__.co_names) if (found := getattr(kind, method, None)) is not None else set()


Method: TypeAlias = Callable[..., Coroutine[Any, Any, None]]


def _held_until_done(method: Method) -> Method:
    @functools.wraps(method)
    async def held(*args: object, **kwargs: object) -> None:
        task = asyncio.current_task()
        _reattaching.add(task)
        try:
            await method(*args, **kwargs)
        finally:
            _reattaching.discard(task)

    return held


def _that_can_be_cancelled(method: Method) -> Method:
    @functools.wraps(method)
    async def wait_closed(self: SHMContext) -> None:
        if (task := getattr(self, "_graph_task", None)) is not None:
            # Unlike `await task`, this raises what its caller is cancelled with, and nothing of the task.
            await asyncio.wait({task})
        await method(self)

    return wait_closed


class _Channels(dict):
    """A dictionary whose values can be iterated over while keys come and go."""

    _n_deleted = 0

    def __delitem__(self, key: object) -> None:
        super().__delitem__(key)
        self._n_deleted += 1

    def values(self) -> Iterator[object]:  # type: ignore[override]
        # Several times a message. So keys are looked up only when one has gone: Python computes the hash of a UUID.
        n_deleted = self._n_deleted
        for key, channel in tuple(self.items()):
            if n_deleted == self._n_deleted:
                yield channel
            elif key in self:
                yield self[key]


def _with_channels_that_may_change(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_with_channels(self: Publisher, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)
        if hasattr(self, "_channels"):
            self._channels = _Channels(self._channels)

    return init_with_channels


_CURES: tuple[tuple[type, str, Callable[[], bool], Callable[..., Callable]], ...] = (
    (ChannelProtocol, "_reattach_shm", _loses_reattachment, _held_until_done),
    (Publisher, "__init__", _iterates_while_it_waits, _with_channels_that_may_change),
    (SHMContext, "wait_closed", _suppresses_cancellation, _that_can_be_cancelled),
)
"""Methods, whether the installed ezmsg has the fault in question, and what mends the method."""


def _reduce_with_workarounds(process: DefaultBackendProcess) -> tuple:
    return _process_with_workarounds, (type(process),), process.__dict__


def _process_with_workarounds(kind: type[DefaultBackendProcess]) -> DefaultBackendProcess:
    apply_workarounds()
    return kind.__new__(kind)


THRASHING_CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"

# What MLX reads, and what it takes where that is not set.
_CAPACITIES = {
    "FFT plans": ("MLX_CUDA_FFT_CACHE_SIZE", 128),
    "convolution plans": ("MLX_CUDA_CONV_CACHE_SIZE", 128),
    "graphs": ("MLX_CUDA_GRAPH_CACHE_SIZE", 400),
}


PER_LENGTH = ("FFT plans", "convolution plans")
"""Caches in which each length of a message takes an entry."""


@dataclass(frozen=True)
class PlanCaches:
    """How many plans MLX keeps on CUDA, and whether it takes many misses for an error."""

    capacities: dict[str, int]
    """Entries of each cache, by what it holds. Each length of an FFT or a convolution takes one at least."""

    refuses: bool
    """Whether MLX raises once twice as many lengths have missed a cache as it has entries."""


def tolerate_misses(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have MLX go on after many misses, in this process and those that it starts, unless the user has said otherwise.

    Where the user has turned the check on, it stays on, and the log warns of what that means for a stream.
    """
    asked = environ.setdefault(THRASHING_CHECK, "0")
    if _as_mlx_reads(asked):
        ez.logger.warning(
            f"{THRASHING_CHECK} is {asked!r}: MLX raises once many message lengths have gone through an FFT or a "
            "convolution on CUDA, and at nearly every message from then on. Rechunk keeps the lengths few; "
            "shape_report() lists them, and the log warns of many."
        )


def plan_caches(environ: Mapping[str, str] = os.environ) -> PlanCaches:
    """The plan caches that MLX has on CUDA with these environment variables."""
    capacities = {}
    for name, (variable, default) in _CAPACITIES.items():
        text = environ.get(variable, "")
        capacities[name] = int(text) if text.isdigit() else default
    return PlanCaches(capacities, _as_mlx_reads(environ.get(THRASHING_CHECK, "1")) != 0)


def _as_mlx_reads(text: str) -> int:
    """The number that *text* begins with, 0 if there is none: MLX uses ``atoi``."""
    number = re.match(r"\s*[+-]?\d+", text)
    return int(number[0]) if number else 0
