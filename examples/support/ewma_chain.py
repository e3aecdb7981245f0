"""What ewma_chain_offline.py and ewma_chain_graph.py share: settings of the stages, options, progress, summary."""

import argparse
import dataclasses
import math
import os
import shutil
import sys
import time

import ezmsg.core as ez
import rich
from ezmsg.sigproc.affinetransform import CommonRereferenceSettings
from ezmsg.sigproc.aggregate import AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateSettings
from ezmsg.sigproc.math.log import LogSettings
from ezmsg.util.messages.axisarray import AxisArray
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn

from ezmsg.mlx import (
    ArrayBackend,
    AsArraySettings,
    CacheLimit,
    EWMASettings,
    MemorySnapshot,
    PowSettings,
    SimulatedAcquisitionSettings,
    cache_limit,
    memory_snapshot,
)
from ezmsg.mlx.command.progress import Interrupts, two_digits
from ezmsg.mlx.memory.__main__ import memory_table

from . import checked_options as checked

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_MEASURES = 0.1

REFERENCE = CommonRereferenceSettings(mode="mean")
BASELINE = EWMASettings(time_constant=1.0)
SQUARE = PowSettings(exponent=2.0)
POWER = EWMASettings(time_constant=0.1)
BIN = BinnedAggregateSettings(bin_duration=0.01, operation=AggregationFunction.MEAN)
LOG = LogSettings(clip_zero=True)
TO_NUMPY = AsArraySettings(backend=ArrayBackend.numpy)


def to_mlx(limit_mb: float | str | None) -> AsArraySettings:
    """Settings of the first stage; *limit_mb* is the limit in MiB on MLX's cache, "auto", or None for no limit."""
    return AsArraySettings(backend=ArrayBackend.mlx, dtype="float32", mlx_cache_limit_mb=limit_mb)


def end_of(message: AxisArray) -> float:
    """Stream time in seconds at which *message* ends."""
    axis = message.axes["time"]
    return axis.offset + message.data.shape[0] * axis.gain


def parse_options(description: str, *, of_graph: bool = False, plot: str = "") -> argparse.Namespace:
    """The command line: ``stream`` (settings of the source), ``to_mlx`` (of the first stage) and ``save``.

    With *plot*, which says what it draws, there is ``plot``, too.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = SimulatedAcquisitionSettings(duration=20.0)
    fields = {
        "duration": ("--duration", "S", checked.positive, "length of the stream in seconds"),
        "n_channels": ("--channels", "N", checked.count, "number of channels"),
        "sampling_rate": ("--rate", "HZ", checked.positive, "samples a second in each channel"),
        "samples_per_message": ("--samples-per-message", "N", checked.count, "length of an ordinary message"),
        "stall_every": ("--stall-every", "N", checked.whole, "messages from one stall to the next, 0: none"),
        "seed": ("--seed", "N", checked.whole, "another seed makes another recording"),
    }
    for field, (option, metavar, kind, text) in fields.items():
        value = getattr(default, field)
        parser.add_argument(option, dest=field, metavar=metavar, type=kind, default=value, help=f"{text} [{value}]")
    text = "run the stages one by one, not as one function"
    parser.add_argument("--unit-by-unit" if of_graph else "--stage-by-stage", action="store_true", help=text)
    if of_graph:
        parser.add_argument("--real-time", action="store_true", help="at the pace of the rate, not as fast as possible")
        text = "cut the messages to three lengths before they leave the source's process"
        parser.add_argument("--rechunk", action="store_true", help=text)
        parser.add_argument("--monitor", action="store_true", help="show more about the memory of MLX's process")
        plot = "where to draw the memory of MLX's process over time"
    if plot:
        parser.add_argument("--plot", metavar="FILE.png", type=checked.picture, help=plot)
    text = 'limit on MLX\'s cache in MiB, "none" or "auto" [512]'
    parser.add_argument("--limit", metavar="MIB", type=checked.mib, default=512.0, help=text)
    text = "where to save the features, shape (bins, channels)"
    parser.add_argument("--save", metavar="FILE.npy", type=checked.array, help=text)
    options = parser.parse_args()
    values = {field: getattr(options, field) for field in fields}
    checked.require_mlx(parser)
    try:
        options.stream = SimulatedAcquisitionSettings(**values, real_time=of_graph and options.real_time)
        options.to_mlx = to_mlx(options.limit)
    except ValueError as error:
        parser.error(str(error))
    # INFO lines would run into the progress line; the variable reaches the processes of a graph.
    ez.logger.setLevel(os.environ.setdefault("EZMSG_LOGLEVEL", "WARNING").upper())
    return options


@dataclasses.dataclass
class Meter:
    """What went into the chain, and the memory in MiB of the process that the chain runs in."""

    n_messages: int = 0
    lengths: set[int] = dataclasses.field(default_factory=set)
    memory: MemorySnapshot | None = None
    first_memory: MemorySnapshot | None = None
    largest_cache: float = 0.0
    limit: CacheLimit = CacheLimit(None, "default")
    next_at: float = 0.0

    def count(self, message: AxisArray) -> None:
        self.n_messages += 1
        self.lengths.add(message.data.shape[0])

    def measure(self) -> None:
        """Measure, at most ten times a second: a look at the memory takes as long as some stages."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + SECONDS_BETWEEN_MEASURES
        self.memory = memory_snapshot()
        self.first_memory = self.first_memory or self.memory
        self.largest_cache = max(self.largest_cache, self.memory.mlx_cache)
        self.limit = cache_limit()


class ProgressLine:
    """Follows the stream on one line of a terminal; elsewhere prints a line now and then. Ctrl-C ends it.

    The line changes ten times a second: it costs nothing to be told of each message.
    """

    def __init__(self, duration: float) -> None:
        self.duration = duration
        self.interrupted = False
        self.memory: MemorySnapshot | None = None
        """Shown as a table below the line when there is one."""
        self.seconds = self.wall = self.speed = 0.0
        self._first: tuple[float, float] | None = None
        self._next_line = self._next_update = -math.inf
        # Not the whole width: the ^C that a terminal writes would start a new line.
        width = max(shutil.get_terminal_size().columns - 72, 5)
        self._bar = Progress(BarColumn(width), TextColumn("{task.description}"))
        self._task = self._bar.add_task("starting", total=duration)
        self._live = Live(get_renderable=self._view, refresh_per_second=10)
        self._interrupts = Interrupts()

    def __enter__(self) -> "ProgressLine":
        self._interrupts.__enter__()
        if sys.stdout.isatty():
            self._live.start()
        return self

    def _view(self) -> RenderableType:
        return Group(self._bar, memory_table(self.memory)) if self.memory else self._bar

    def update(self, seconds: float, meter: Meter) -> None:
        self._interrupts.check()
        now = time.monotonic()
        # From the first features on, for the processes start and the kernels compile before them.
        self._first = self._first or (now, seconds)
        self.seconds, self.wall = seconds, now - self._first[0]
        self.speed = (seconds - self._first[1]) / self.wall if self.wall else 0.0
        if now < self._next_update or meter.memory is None:
            return
        self._next_update = now + SECONDS_BETWEEN_MEASURES
        memory = meter.memory
        text = (
            f"{seconds:.0f}/{self.duration:.0f} s  {two_digits(self.speed)}x real time  "
            f"cache {memory.mlx_cache:.0f}  RSS {memory.resident_set:.0f} MiB  {len(meter.lengths)} lengths"
        )
        if sys.stdout.isatty():
            self._bar.update(self._task, completed=seconds, description=text)
        elif now >= self._next_line:
            self._next_line = now + SECONDS_BETWEEN_LINES
            print(text, flush=True)
            self._print_memory()

    def _print_memory(self) -> None:
        if self.memory:
            rich.print(memory_table(self.memory))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._interrupts.__exit__()
        if sys.stdout.isatty():
            self._live.stop()
        else:
            # The first row may come after the last line.
            self._print_memory()
        self.interrupted = kind is KeyboardInterrupt
        return self.interrupted

    def print_summary(self, meter: Meter) -> None:
        limit = meter.limit
        value = "MLX's default" if limit.limit_mb is None else f"{limit.limit_mb:g} MiB"
        asker = {"node": f"asked for by {limit.node}", "outside": "set elsewhere", "default": "nobody asked for one"}
        print(f"stream     {self.seconds:.2f} s{', interrupted' if self.interrupted else ''}")
        print(f"wall time  {self.wall:.2f} s, {self.speed:.2f}x real time")
        print(f"messages   {meter.n_messages}, of {len(meter.lengths)} different lengths")
        print(f"MLX cache  {meter.largest_cache:.1f} MiB at most")
        print(f"limit      {value}, {asker[limit.source]}")
        if meter.memory:
            first, last = meter.first_memory.resident_set, meter.memory.resident_set
            print(f"RSS        {first:.0f} MiB first, {last:.0f} MiB last")
