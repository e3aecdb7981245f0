"""Recordings as they are found: odd rates and lengths, constant or silent channels, samples that are not finite."""

import functools
from collections.abc import Callable

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import AsArrayTransformer, ButterworthFilterTransformer, DetrendTransformer, RechunkSettings, chains

from .offline_memory import MemorySource


def detrended() -> list[object]:
    """Filter and average whose results are samples."""
    return [
        AsArrayTransformer(backend="mlx", dtype="float32"),
        ButterworthFilterTransformer(order=2, cuton=300.0, coef_type="sos"),
        DetrendTransformer(time_constant=0.02),
        AsArrayTransformer(backend="numpy"),
    ]


FACTORIES: list[Callable[[], object]] = [
    chains.spike_band_power,
    functools.partial(chains.spike_band_power, reference="median", bin_seconds=0.0137),
    functools.partial(chains.band_pass, reference="none"),
    functools.partial(chains.band_pass, reference="mean", dtype="int16"),
    functools.partial(chains.ewma_features, detrend_seconds=0.05, smooth_seconds=0.01, log=False),
    detrended,
]


class RandomRecording(MemorySource):
    """The recording number *seed*, and how it is processed."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        rate = float(rng.choice([14_000.0, 24_414.0625, 30_000.0, 30_000.3, 20_000.0 / 1.0007]))
        super().__init__(n_samples=int(rng.integers(40_000, 160_000)), chunk=int(rng.integers(500, 20_000)), rate=rate)
        n_channels = int(rng.integers(1, 6))
        data = rng.normal(0.0, 10.0 ** rng.uniform(0.5, 3.0, n_channels), (self.n_samples, n_channels))
        data = np.clip(np.rint(data), -32768, 32767).astype(np.float32 if rng.random() < 0.5 else np.int16)
        for channel in range(n_channels):
            kind = rng.random()
            if kind < 0.2 and n_channels > 1:
                data[:, channel] = rng.choice([0, 1000, 32767])
            elif kind < 0.5 and data.dtype == np.float32:
                for begin in rng.integers(0, self.n_samples, rng.integers(1, 4)):
                    data[begin : begin + int(rng.integers(1, 30_000)), channel] = rng.choice([np.nan, np.inf])
        self.data, self.identity = data, f"random recording {seed}"
        self.factory = FACTORIES[int(rng.integers(len(FACTORIES)))]
        self.rechunk = RechunkSettings(sizes=(int(rng.choice([64, 1000, 3000])),)) if rng.random() < 0.8 else None
        self.seconds = float(rng.uniform(0.2, 2.0))
        """Length of a piece."""

    def message(self, begin: int, end: int) -> AxisArray:
        time = AxisArray.TimeAxis(fs=self.sampling_rate, offset=begin / self.sampling_rate)
        return AxisArray(self.data[begin:end], dims=["time", "ch"], axes={"time": time}, key="r", stream_dim="time")
