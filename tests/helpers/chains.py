"""Streams and chains for tests of fused chains, and their results stage by stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from ezmsg.baseproc import BaseTransformer
from ezmsg.sigproc.affinetransform import (
    AffineTransformSettings,
    AffineTransformTransformer,
    CommonRereferenceSettings,
    CommonRereferenceTransformer,
)
from ezmsg.sigproc.aggregate import AggregateSettings, AggregateTransformer, AggregationFunction
from ezmsg.sigproc.binned_aggregate import BinnedAggregateSettings, BinnedAggregateTransformer
from ezmsg.sigproc.downsample import DownsampleSettings, DownsampleTransformer
from ezmsg.sigproc.math.abs import AbsTransformer
from ezmsg.sigproc.math.clip import ClipSettings, ClipTransformer
from ezmsg.sigproc.math.log import LogSettings, LogTransformer
from ezmsg.util.messages.axisarray import AxisArray
from scipy.signal import butter

import ezmsg.mlx as mlx_package
from ezmsg.mlx import (
    AdaptiveStandardScalerTransformer,
    AsArraySettings,
    AsArrayTransformer,
    ButterworthFilterTransformer,
    DetrendTransformer,
    EWMASettings,
    EWMATransformer,
    FilterSettings,
    FilterTransformer,
    PowTransformer,
)

FS = 30000.0
N_CHANNELS = 6
CHANNELS = AxisArray.CoordinateAxis(data=np.array([f"ch{i}" for i in range(N_CHANNELS)]), dims=["ch"])

MEAN, MIN, MAX = AggregationFunction.MEAN, AggregationFunction.MIN, AggregationFunction.MAX

STAGES: dict[str, Callable[[], BaseTransformer]] = {
    "reference": CommonRereferenceTransformer,
    "reference others": lambda: CommonRereferenceTransformer(CommonRereferenceSettings(include_current=False)),
    "reference groups": lambda: CommonRereferenceTransformer(
        CommonRereferenceSettings(channel_groups=[[0, 1], [2, 3, 4, 5]])
    ),
    "median": lambda: CommonRereferenceTransformer(CommonRereferenceSettings(mode="median")),
    "median of groups": lambda: mlx_package.CommonRereferenceTransformer(
        mode="median", channel_groups=[[5, 1], [2, 0, 4]], include_current=False
    ),
    "detrend": lambda: DetrendTransformer(EWMASettings(time_constant=0.01)),
    "average": lambda: EWMATransformer(EWMASettings(time_constant=0.002)),
    "frozen average": lambda: EWMATransformer(EWMASettings(time_constant=0.002, accumulate=False)),
    "square": PowTransformer,
    "cube": lambda: PowTransformer(exponent=3.0),
    "abs": AbsTransformer,
    "clip": lambda: ClipTransformer(ClipSettings(min=-50.0, max=200.0)),
    "log": lambda: LogTransformer(LogSettings(clip_zero=True)),
    "bins": lambda: BinnedAggregateTransformer(BinnedAggregateSettings(bin_duration=0.002)),
    "uneven bins": lambda: BinnedAggregateTransformer(BinnedAggregateSettings(bin_duration=0.00151)),
    "envelope": lambda: BinnedAggregateTransformer(BinnedAggregateSettings(bin_duration=0.001, operation=(MIN, MAX))),
    "downsample": lambda: DownsampleTransformer(DownsampleSettings(factor=4)),
    "mix": lambda: AffineTransformTransformer(
        AffineTransformSettings(weights=np.random.default_rng(1).standard_normal((N_CHANNELS, N_CHANNELS)))
    ),
    "sections": lambda: FilterTransformer(
        FilterSettings(coefs=butter(2, 3000.0, fs=FS, output="sos"), coef_type="sos")
    ),
    "scores": lambda: AdaptiveStandardScalerTransformer(time_constant=0.01),
    "band": lambda: ButterworthFilterTransformer(order=2, cuton=300.0, cutoff=5000.0, coef_type="sos"),
    "over channels": lambda: AggregateTransformer(AggregateSettings(axis="ch", operation=MAX)),
}
"""Transformers by name, from MLX data to MLX data."""

EXACT = {
    *("detrend", "average", "frozen average", "scores", "square", "abs", "clip", "envelope", "downsample", "median"),
    "median of groups",
}
"""Those that the same code computes on the CPU, fused or not, or whose results are not rounded. All others are held to
1e-6 of the largest value: how NumPy, MLX and the compiler of a loop round depends on the processor."""


def to_mlx() -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend="mlx", dtype="float32"))


def to_numpy() -> AsArrayTransformer:
    return AsArrayTransformer(AsArraySettings(backend="numpy"))


def make(names: Iterable[str]) -> list[BaseTransformer]:
    """The named stages between two conversions."""
    return [to_mlx(), *(STAGES[name]() for name in names), to_numpy()]


def stream(
    lengths: Sequence[int], dtype: str = "int16", seed: int = 0, n_channels: int = N_CHANNELS
) -> list[AxisArray]:
    """Messages of these lengths, (time, ch)."""
    rng, start, messages = np.random.default_rng(seed), 0, []
    for n in lengths:
        data = (100.0 * rng.standard_normal((n, n_channels)) + 30.0).astype(dtype)
        axes = {"time": AxisArray.TimeAxis(fs=FS, offset=start / FS), "ch": CHANNELS}
        messages.append(AxisArray(data, ["time", "ch"], axes, attrs={"n": start}, key="test", stream_dim="time"))
        start += n
    return messages


def one_by_one(stages: Sequence[BaseTransformer], message: AxisArray) -> list[AxisArray]:
    """What the stages make of one message, without their flush."""
    messages = [message]
    for stage in stages:
        messages = [result for each in messages for result in as_list(stage(each))]
    return messages


def as_list(output: AxisArray | list[AxisArray] | None) -> list[AxisArray]:
    if output is None:
        return []
    return output if isinstance(output, list) else [output]


def is_exact(way: str, names: Iterable[str]) -> bool:
    """Whether a chain of the named stages gives the same bits, fused in this way, as its stages one by one."""
    return way == "cpu" and EXACT.issuperset(names)


def assert_same(result: AxisArray, expected: AxisArray, *, exact: bool = True, tolerance: float = 1e-5) -> None:
    """That two messages are equal, in data and in all that is known of them.

    Unless *exact*, data may differ by *tolerance*, as a share of the largest value.
    """
    assert type(result.data) is type(expected.data)
    assert result.data.dtype == expected.data.dtype
    fields = {"dims", "attrs", "key", "stream_dim"}
    assert fields < {field.name for field in dataclasses.fields(AxisArray)}
    for field in fields:
        assert getattr(result, field) == getattr(expected, field), field
    assert result.axes == expected.axes
    y, x = np.asarray(result.data), np.asarray(expected.data)
    assert y.shape == x.shape
    if exact:
        np.testing.assert_array_equal(y, x)
    else:
        largest = np.abs(x[np.isfinite(x)]).max(initial=1e-30)
        np.testing.assert_allclose(y, x, rtol=2 * tolerance, atol=tolerance * largest)
