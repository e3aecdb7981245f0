"""The second process of the soak test: the example's chain on MLX, with a unit that refuses messages."""

import itertools
import math
import time
from collections.abc import AsyncGenerator

from support import ewma_chain as shared

import ezmsg.core as ez
import numpy as np
from ezmsg.sigproc.affinetransform import CommonRereference
from ezmsg.sigproc.binned_aggregate import BinnedAggregate
from ezmsg.sigproc.math.log import Log
from ezmsg.sigproc.spectrum import SpectralTransform, Spectrum, SpectrumSettings
from ezmsg.util.messages.axisarray import AxisArray
from ezmsg.util.messages.util import replace

from ezmsg.mlx import (
    AsArray,
    AsArraySettings,
    ButterworthFilter,
    ButterworthFilterSettings,
    DetrendUnit,
    EWMASettings,
    EWMAUnit,
    MemoryMonitor,
    MemoryMonitorSettings,
    Pow,
    cache_limit,
    memory_snapshot,
)
from soak.settings import LIMITS_MB, POWER_SECONDS, RELEASE_AFTER_IDLE, SoakSettings, span
from soak.stream import LONGEST, N_CHANNELS
from soak.watch import Watch, WatchSettings


class Refuse(ez.Unit):
    """Raises on every ``refuse_every``-th message, and lets the others through."""

    SETTINGS = SoakSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        self.n_messages = 0
        self.kept: list[np.ndarray] = []

    @ez.subscriber(INPUT_SIGNAL)
    @ez.publisher(OUTPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> AsyncGenerator:
        self.n_messages += 1
        start, stop = span(message)
        if self.n_messages % self.SETTINGS.refuse_every == 0 and stop > start and not message.attrs["n_samples"]:
            if self.SETTINGS.fault == "hush":
                return
            raise ValueError(f"refused samples {start} to {stop}")
        if self.SETTINGS.fault == "leak":
            self.kept.append(np.ones(1 << 17))
        yield self.OUTPUT_SIGNAL, message


class ChainWatchSettings(WatchSettings):
    fault: str = ""


class ChainWatch(Watch):
    """Also looks at MLX's cache after each message, and receives the branches: a spectrum and a band.

    ``memory`` in its report are moments in seconds, and MLX's active memory, its cache and the device's memory in use
    then, in MiB; without a device of its own that is None.
    """

    SETTINGS = ChainWatchSettings

    INPUT_RESULT = ez.InputStream(AxisArray)
    INPUT_SPECTRUM = ez.InputStream(AxisArray)
    INPUT_BAND = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        await super().initialize()
        self.largest = self.excess = 0.0
        self.limits: set[float] = set()
        self.seen = {"spectrum": 0, "band": 0}
        self.wrong: list[str] = []
        self.memory: list[tuple[float, float, float, float | None]] = []

    @ez.subscriber(INPUT_RESULT)
    async def on_result(self, message: AxisArray) -> None:
        import mlx.core as mx

        cache, limit = mx.get_cache_memory() / 2**20, cache_limit().limit_mb
        if cache > limit:
            # On a GPU a lower limit takes effect at the next allocation, and this may be a message without samples.
            mx.eval(mx.zeros(1000) + 1)
            cache = mx.get_cache_memory() / 2**20
        now = time.monotonic()
        if not self.memory or now - self.memory[-1][0] >= 0.25:
            device = memory_snapshot().device_memory
            self.memory.append((now, mx.get_active_memory() / 2**20, cache, None if math.isnan(device) else device))
        self.limits.add(limit)
        self.largest = max(self.largest, cache)
        self.excess = max(self.excess, cache - limit)
        if self.SETTINGS.fault == "cache":
            mx.set_cache_limit(1 << 40)

    def check(self, name: str, message: AxisArray) -> None:
        self.seen[name] += 1
        if message.attrs["number"] != self.seen[name] and len(self.wrong) < 20:
            self.wrong.append(f"message {message.attrs['number']} of the {name} is number {self.seen[name]}")
            self.seen[name] = message.attrs["number"]
        if not np.isfinite(np.asarray(message.data)).all() and len(self.wrong) < 20:
            self.wrong.append(f"message {self.seen[name]} of the {name} is not finite")

    @ez.subscriber(INPUT_SPECTRUM)
    async def on_spectrum(self, message: AxisArray) -> None:
        self.check("spectrum", message)

    @ez.subscriber(INPUT_BAND)
    async def on_band(self, message: AxisArray) -> None:
        self.check("band", message)

    def report(self) -> dict[str, object]:
        import mlx.core as mx

        found = {"cache": self.largest, "excess": self.excess, "limits": sorted(self.limits), "wrong": self.wrong}
        device = mx.device_info(mx.default_device()).get("device_name")
        return found | self.seen | {"memory": self.memory, "device": device}


class Long(ez.Unit):
    """Lets messages through that have a spectrum."""

    INPUT_SIGNAL = ez.InputStream(AxisArray)
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    async def initialize(self) -> None:
        self.n_messages = 0

    @ez.subscriber(INPUT_SIGNAL)
    @ez.publisher(OUTPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> AsyncGenerator:
        if message.data.shape[0] > 1:
            self.n_messages += 1
            yield self.OUTPUT_SIGNAL, replace(message, attrs={**message.attrs, "number": self.n_messages})


class Chain(ez.Collection):
    """The example's chain with a unit that refuses; its last average comes out as well as the features."""

    SETTINGS = SoakSettings
    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    INPUT_LIMIT = ez.InputTopic(AsArraySettings)
    INPUT_POWER = ez.InputTopic(EWMASettings)
    OUTPUT_POWER = ez.OutputTopic(AxisArray)
    OUTPUT_FEATURES = ez.OutputTopic(AxisArray)

    TO_MLX = AsArray(shared.to_mlx(LIMITS_MB[0]))
    REFUSE = Refuse()
    REFERENCE = CommonRereference(shared.REFERENCE)
    DETREND = DetrendUnit(shared.BASELINE)
    SQUARE = Pow(shared.SQUARE)
    POWER = EWMAUnit(EWMASettings(time_constant=POWER_SECONDS[0]))
    POWER_TO_NUMPY = AsArray(shared.TO_NUMPY)
    BIN = BinnedAggregate(shared.BIN)
    LOG = Log(shared.LOG)
    FEATURES_TO_NUMPY = AsArray(shared.TO_NUMPY)
    LONG = Long()
    SPECTRUM = Spectrum(SpectrumSettings(axis="time", transform=SpectralTransform.REL_POWER))
    BAND = ButterworthFilter(ButterworthFilterSettings(order=4, cuton=300.0, cutoff=6000.0))
    MONITOR = MemoryMonitor(MemoryMonitorSettings(interval=0.2, release_after_idle=RELEASE_AFTER_IDLE))
    WATCH = ChainWatch()

    def configure(self) -> None:
        self.REFUSE.apply_settings(self.SETTINGS)
        self.WATCH.apply_settings(ChainWatchSettings(self.SETTINGS.folder, "chain", self.SETTINGS.fault))
        self.POWER_TO_NUMPY.OUTPUT_SIGNAL.num_buffers = 4
        self.POWER_TO_NUMPY.OUTPUT_SIGNAL.buf_size = LONGEST * N_CHANNELS * 4 + 2**16

    def network(self) -> ez.NetworkDefinition:
        stages = (self.TO_MLX, self.REFUSE, self.REFERENCE, self.DETREND, self.SQUARE, self.POWER)
        features = (self.POWER, self.BIN, self.LOG, self.FEATURES_TO_NUMPY)
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in itertools.pairwise(stages)),
            (self.REFERENCE.OUTPUT_SIGNAL, self.LONG.INPUT_SIGNAL),
            (self.LONG.OUTPUT_SIGNAL, self.SPECTRUM.INPUT_SIGNAL),
            (self.LONG.OUTPUT_SIGNAL, self.BAND.INPUT_SIGNAL),
            (self.SPECTRUM.OUTPUT_SIGNAL, self.WATCH.INPUT_SPECTRUM),
            (self.BAND.OUTPUT_SIGNAL, self.WATCH.INPUT_BAND),
            (self.POWER.OUTPUT_SIGNAL, self.POWER_TO_NUMPY.INPUT_SIGNAL),
            (self.POWER_TO_NUMPY.OUTPUT_SIGNAL, self.OUTPUT_POWER),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in itertools.pairwise(features)),
            (self.FEATURES_TO_NUMPY.OUTPUT_SIGNAL, self.OUTPUT_FEATURES),
            (self.POWER_TO_NUMPY.OUTPUT_SIGNAL, self.WATCH.INPUT_RESULT),
            (self.INPUT_LIMIT, self.TO_MLX.INPUT_SETTINGS),
            (self.INPUT_POWER, self.POWER.INPUT_SETTINGS),
        )
