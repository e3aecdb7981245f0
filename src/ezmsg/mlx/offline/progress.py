"""How far a recording has got, as a bar on a terminal."""

import contextlib
import sys
import time
import typing
from collections.abc import Callable, Iterator

Report = Callable[[int, int], None]
"""Takes the number of samples done and that of all samples."""


@contextlib.contextmanager
def reporting(
    progress: Report | typing.Literal[False] | None, recording: str, sampling_rate: float
) -> Iterator[Report | None]:
    """What to call after each chunk; a bar while the ``with`` block lasts, if *progress* is None.

    Args:
        progress: See :func:`ezmsg.mlx.process_recording`.
        recording: Its identity, which begins with its name.
        sampling_rate: Samples a second.
    """
    if progress is not None:
        yield None if progress is False else progress
        return
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
    except ImportError:  # it comes with the extra "offline"
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[speed]}"), console=Console(stderr=True)) as bar:
        task = bar.add_task(recording.partition(" ")[0], total=None, speed="")
        begin, first = time.monotonic(), None

        def report(done: int, total: int) -> None:
            nonlocal first
            if first is None:
                first = done
            speed = (done - first) / float(sampling_rate) / max(time.monotonic() - begin, 1e-9)
            bar.update(task, completed=done, total=total, speed=f"{speed:.0f}x real time" if speed else "")

        yield report
