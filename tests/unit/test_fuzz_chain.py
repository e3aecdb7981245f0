"""Any data through AsArray, a chain on MLX, and AsArray back: the numbers of NumPy and SciPy in float64.

``EZMSG_MLX_FUZZ_EXAMPLES=5000`` tries so many examples rather than a few.
"""

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers import chain_in_float64 as in_float64
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from scipy.signal import butter

from ezmsg.mlx import (
    AsArraySettings,
    AsArrayTransformer,
    DetrendTransformer,
    EWMASettings,
    EWMATransformer,
    FilterSettings,
    FilterTransformer,
    PowSettings,
    PowTransformer,
    ReadLateSettings,
    ReadLateTransformer,
    RechunkSettings,
    RechunkTransformer,
)
from ezmsg.mlx.kernels import default_path

mx = pytest.importorskip("mlx.core", exc_type=ImportError)

N_EXAMPLES = int(os.environ.get("EZMSG_MLX_FUZZ_EXAMPLES", "100"))
fuzz = settings(
    max_examples=N_EXAMPLES,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
    database=None,
)

FS = 30000.0
DTYPES = (
    *("bool", "int8", "uint8", "<i2", ">i2", "uint16", "<i4", ">i4", "uint32", "<i8", ">u8", "uint64"),
    *("<f2", ">f2", "<f4", ">f4", "<f8", ">f8"),
)


# The data


@dataclasses.dataclass(frozen=True)
class Recording:
    """A stream, cut into messages whose data lie in memory in some way."""

    dtype: str
    lengths: tuple[int, ...]
    before: tuple[int, ...]
    """Lengths of the dimensions in front of the stream dimension."""
    after: tuple[int, ...]
    layouts: tuple[str, ...]
    scale: float
    bad: tuple[tuple[float, float], ...]
    """Samples that are something else: where in the stream, from 0 to 1, and what."""
    seed: int

    def whole(self) -> npt.NDArray:
        """The stream in one piece, native byte order."""
        rng = np.random.default_rng(self.seed)
        dtype = np.dtype(self.dtype).newbyteorder("=")
        shape = (*self.before, sum(self.lengths), *self.after)
        if dtype.kind == "b":
            return rng.integers(0, 2, shape).astype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            bound = min(int(self.scale), info.max)
            return rng.integers(max(-bound, info.min), bound, shape, dtype=dtype, endpoint=True)
        with np.errstate(over="ignore"):
            data = (self.scale * (rng.standard_normal(shape) + rng.integers(-5, 6))).astype(dtype)
            for place, value in self.bad if data.size else ():
                data.reshape(-1)[int(place * (data.size - 1))] = value
        return data

    def messages(self) -> list[AxisArray]:
        whole, axis, start, made = self.whole(), len(self.before), 0, []
        dims = [f"before{i}" for i in range(axis)] + ["time"] + [f"after{i}" for i in range(len(self.after))]
        for n, layout in zip(self.lengths, self.layouts, strict=True):
            data = whole.take(range(start, start + n), axis).astype(self.dtype)
            axes = {"time": AxisArray.TimeAxis(fs=FS, offset=start / FS)}
            made.append(AxisArray(LAYOUTS[layout](data), dims, axes, key="fuzz", stream_dim="time"))
            start += n
        return made

    def time_first(self, data: npt.NDArray) -> npt.NDArray:
        """Shape (time, channels)."""
        data = np.moveaxis(data, len(self.before), 0)
        return data.reshape(len(data), math.prod((*self.before, *self.after)))


def strided(data: npt.NDArray) -> npt.NDArray:
    """Every other item in each dimension of something larger."""
    wide = np.zeros([2 * n + 1 for n in data.shape], data.dtype)
    view = wide[tuple(slice(1, None, 2) for _ in data.shape)]
    view[...] = data
    return view


def reversed_(data: npt.NDArray) -> npt.NDArray:
    flip = tuple(slice(None, None, -1) for _ in data.shape)
    return data[flip].copy()[flip]


def unaligned(data: npt.NDArray) -> npt.NDArray:
    """A field of packed records."""
    records = np.zeros(data.shape, [("flag", "u1"), ("value", data.dtype)])
    records["value"] = data
    return records["value"]


def read_only(data: npt.NDArray) -> npt.NDArray:
    data.flags.writeable = False
    return data


LAYOUTS: dict[str, Callable[[npt.NDArray], npt.NDArray]] = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "strided": strided,
    "reversed": reversed_,
    "unaligned": unaligned,
    "read-only": read_only,
}

lengths = st.lists(
    st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 300]), st.integers(0, 64), st.integers(0, 1500)),
    min_size=1,
    max_size=5,
).map(tuple)
others = st.lists(st.sampled_from([1, 2, 3, 5, 1, 2, 3, 5, 0]), max_size=2).map(tuple)
bad_values = st.sampled_from([math.nan, math.inf, -math.inf, 3.4e38, -3.4e38, 1e30, 1.1e30, 1e-40, 1e200, -0.0])


@st.composite
def recordings(draw: st.DrawFn, dtypes: tuple[str, ...] = DTYPES) -> Recording:
    n = draw(lengths)
    return Recording(
        dtype=draw(st.sampled_from(dtypes)),
        lengths=n,
        before=draw(others),
        after=draw(others),
        layouts=tuple(draw(st.sampled_from(list(LAYOUTS))) for _ in n),
        scale=draw(st.sampled_from([1.0, 1.0, 500.0, 30000.0, 1e9, 1e18, 1e25, 1e37, 1e-6, 1e-30])),
        bad=tuple(draw(st.lists(st.tuples(st.floats(0, 1), bad_values), max_size=4))),
        seed=draw(st.integers(0, 2**16)),
    )


# The chain

SOS = {
    "low-pass": butter(2, 3000.0, fs=FS, output="sos"),
    "high-pass": butter(1, 300.0, "highpass", fs=FS, output="sos"),
    "band-pass": butter(2, [300.0, 6000.0], "bandpass", fs=FS, output="sos"),
}
Stage = tuple[str, float | str]
stage = st.one_of(
    st.tuples(st.sampled_from(["average", "detrend"]), st.sampled_from([1e-4, 0.01, 1.0, 60.0])),
    st.tuples(st.just("power"), st.sampled_from([2.0, 2.0, 3.0])),
    st.tuples(st.just("sections"), st.sampled_from(sorted(SOS))),
)
stages = st.one_of(*(st.lists(stage, min_size=n, max_size=n) for n in (1, 2, 3)))
rechunk = st.one_of(
    st.none(),
    st.builds(
        RechunkSettings,
        sizes=st.lists(st.integers(1, 400), min_size=1, max_size=2).map(tuple),
        remainder=st.sampled_from(["carry", "emit"]),
    ),
)


def on_mlx(stage: Stage) -> Callable[[AxisArray], AxisArray]:
    kind, value = stage
    if kind == "power":
        return PowTransformer(PowSettings(exponent=value))
    if kind == "sections":
        return FilterTransformer(FilterSettings(coefs=SOS[value], coef_type="sos"))
    return {"average": EWMATransformer, "detrend": DetrendTransformer}[kind](EWMASettings(time_constant=value))


def by_scipy(stage: Stage, stream: in_float64.Stream) -> in_float64.Stream:
    """The same."""
    kind, value = stage
    if kind == "power":
        return in_float64.power(stream, value)
    if kind == "sections":
        return in_float64.sections(stream, SOS[value])
    return getattr(in_float64, kind)(stream, math.exp(-1.0 / (FS * value)))


def result_of(
    recording: Recording, chain: list[Stage], cut: RechunkSettings | None, cut_first: bool, depth: int
) -> tuple[npt.NDArray, list[float]]:
    """All that comes out, and the offset of each message in samples."""
    to_mlx = AsArrayTransformer(AsArraySettings(backend="mlx", dtype="float32"))
    back = ReadLateTransformer(ReadLateSettings(depth=depth))
    rechunk = RechunkTransformer(cut) if cut else None
    transformers = [on_mlx(stage) for stage in chain]
    arrived = recording.messages()
    out = []

    def put(message: AxisArray) -> None:
        for transformer in transformers:
            message = transformer(message)
        out.extend(back(message))

    for message in arrived:
        before = message.data.tobytes()
        if rechunk is None:
            put(to_mlx(message))
        else:
            for piece in map(to_mlx, rechunk(message)) if cut_first else rechunk(to_mlx(message)):
                put(piece)
        assert message.data.tobytes() == before
    for piece in rechunk.flush() if rechunk else ():
        put(to_mlx(piece))
    out.extend(back.flush())
    for message in out:
        assert type(message.data) is np.ndarray and message.data.dtype == np.float32
    axis = len(recording.before)
    offsets = [message.axes["time"].offset * FS for message in out]
    return np.concatenate([message.data for message in out], axis), offsets


# Plain operations and Metal treat samples that are not finite differently, see ezmsg.mlx.ewma.
recordings_for_chain = recordings() if default_path() in ("cpu", "cuda") else recordings(DTYPES[:12])


def beginning_with(value: float) -> Recording:
    layouts = ("C", "F")
    return Recording("<f4", (1, 300), (), (2,), layouts, scale=1.0, bad=((0.0, value),), seed=0)


@fuzz
@example(beginning_with(3.4e38), [("sections", "band-pass")], None, False, 0)
@example(beginning_with(math.nan), [("sections", "high-pass")], None, False, 0)
@given(recordings_for_chain, stages, rechunk, st.booleans(), st.integers(0, 2))
def test_any_data_through_any_chain_gives_the_numbers_of_float64(recording, chain, cut, cut_first, depth):
    event("->".join(kind for kind, _ in chain))
    y, offsets = result_of(recording, chain, cut, cut_first, depth)
    expected = in_float64.to_float32(recording.time_first(recording.whole()))
    for stage in chain:
        expected = by_scipy(stage, expected)
    in_float64.check(recording.time_first(y), expected)
    if cut is None:
        np.testing.assert_allclose(offsets, np.cumsum([0, *recording.lengths[:-1]]), atol=1e-6)


@fuzz
@given(recordings(), st.booleans())
def test_any_data_comes_back_as_it_was(recording, repeat):
    to_mlx, to_numpy = (AsArrayTransformer(AsArraySettings(backend=backend)) for backend in ("mlx", "numpy"))
    for message in recording.messages():
        if repeat:
            # Strides of zero.
            message.data = np.broadcast_to(message.data, (2, *message.data.shape))
            message.dims = ["again", *message.dims]
        expected = message.data.astype(np.dtype(recording.dtype).newbyteorder("="))
        if expected.dtype == np.float64:
            with np.errstate(over="ignore"):
                expected = expected.astype(np.float32)
        result = to_numpy(to_mlx(message)).data
        np.testing.assert_array_equal(result, expected, strict=True)
