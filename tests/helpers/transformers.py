"""The filters with a memory as a table, the messages that they get, and what the tests of all of them need."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import ezmsg.sigproc.butterworthfilter as sigproc_butterworth
import ezmsg.sigproc.ewma as sigproc_ewma
import ezmsg.sigproc.filter as sigproc_filter
import ezmsg.sigproc.scaler as sigproc_scaler
import mlx.core as mx
import numpy as np
from ezmsg.baseproc import BaseTransformer
from ezmsg.util.messages.axisarray import AxisArray

import ezmsg.mlx.ewma
import ezmsg.mlx.filter
import ezmsg.mlx.kernels
import ezmsg.mlx.scaler
from ezmsg.mlx.butterworthfilter import ButterworthFilter, ButterworthFilterTransformer
from ezmsg.mlx.ewma import EWMATransformer, EWMAUnit
from ezmsg.mlx.filter import Filter, FilterTransformer
from ezmsg.mlx.scaler import AdaptiveStandardScaler, AdaptiveStandardScalerTransformer

from .recurrences import BAND_PASS, FS

Data = np.ndarray | mx.array


def message(data: Data, fs: float = FS, key: str = "amp", **fields) -> AxisArray:
    dims = fields.pop("dims", ["time", "ch", "x"][: data.ndim])
    axes = fields.pop("axes", {"time": AxisArray.TimeAxis(fs=fs)})
    return AxisArray(data, dims=dims, axes=axes, key=key, **fields)


def labelled(data: Data, labels: str, fs: float = FS, **fields) -> AxisArray:
    """A message whose channels have a letter each."""
    channels = AxisArray.CoordinateAxis(data=np.array(list(labels)), dims=["ch"])
    return message(data, axes={"time": AxisArray.TimeAxis(fs=fs), "ch": channels}, **fields)


def call(transformer: BaseTransformer, sent: AxisArray, how: str = "sync") -> AxisArray:
    return transformer(sent) if how == "sync" else asyncio.run(transformer.__acall__(sent))


def filtered(transformer: BaseTransformer, data: Data, how: str = "sync", **fields) -> np.ndarray:
    """What comes of *data* in a message with *fields*."""
    return np.array(call(transformer, message(data, **fields), how).data)


@contextlib.contextmanager
def using(path: str) -> Iterator[list[str]]:
    """Make transformers take *path*, whatever MLX's default device. Gives the choices, up to now."""
    chosen: list[str] = []

    def choose() -> str:
        chosen.append(path)
        return path

    with (
        mock.patch.object(ezmsg.mlx.ewma, "default_path", choose),
        mock.patch.object(ezmsg.mlx.filter, "default_path", choose),
        mock.patch.object(ezmsg.mlx.kernels, "default_path", choose),
        mock.patch.object(ezmsg.mlx.scaler, "default_path", choose),
    ):
        yield chosen


AVERAGE_SCENARIOS = {
    "accumulate switched off and on": [200, dict(accumulate=False), 50, 50, 7, dict(accumulate=True), 300],
    "accumulate off from the start": [dict(accumulate=False), 40, 40, 3, dict(accumulate=True), 100, 1],
    "passthrough": [200, dict(passthrough=True), 50, 0, dict(passthrough=False), 70, 3],
    "passthrough from the start": [dict(passthrough=True), 50, dict(passthrough=False), 70, 3],
    "reset on resume": [dict(reset_on_resume=True), 200, dict(passthrough=True), 50, dict(passthrough=False), 70, 3],
    "reset on resume, but only empty messages passed": [
        dict(reset_on_resume=True), 200, dict(passthrough=True), 0, dict(passthrough=False), 70, 3,
    ],
    "reset on resume set during the gap": [
        200, dict(passthrough=True), 9, dict(reset_on_resume=True), 9, dict(passthrough=False), 70,
    ],
    "another time constant": [200, dict(time_constant=0.1), 70, 3],
    "the same time constant again": [200, dict(time_constant=0.01), 70, 3],
    "chunk sizes": [200, dict(mlx_metal_chunk_sizes=(8, 64)), 100, 3],
    "empty messages": [0, 0, 200, 0, 30, 0],
}  # fmt: skip

DESIGN_SCENARIOS = {
    "other frequencies": [400, dict(cuton=500.0), 300],
    "another kind of filter": [400, dict(cuton=5000.0, cutoff=300.0), 300],
    "another order": [400, dict(order=2), 300, dict(order=3), 99],
    "off and on again": [400, dict(order=0), 50, dict(order=4), 300],
    "before the first message": [dict(cuton=500.0), 300],
    "chunk sizes": [200, dict(mlx_metal_chunk_sizes=(8, 64)), 100, 3],
    "empty messages": [0, 0, 200, 0, dict(cuton=500.0), 0, 30, 0],
}


@dataclasses.dataclass(frozen=True)
class Habits:
    ours: Callable[..., BaseTransformer]
    theirs: Callable[..., BaseTransformer]
    """The one of ezmsg-sigproc."""

    unit: type
    settings: dict[str, object]
    off: tuple[dict[str, object], ...]
    """Settings with which messages go through as they are."""

    scenarios: dict[str, list[int | dict[str, object]]]
    """Lengths of messages, and the settings that are changed between them."""

    needs_rate: bool = True
    unread: tuple[dict[str, object], ...] = ({},)
    """Settings with which the state is kept in different ways."""

    tolerance: float = 1e-5

    def make(self, **changes: object) -> BaseTransformer:
        return self.ours(**{**self.settings, **changes})

    def make_theirs(self, **changes: object) -> BaseTransformer:
        return self.theirs(**{**self.settings, **changes})

    def expected_of(self, x: np.ndarray, **fields) -> np.ndarray:
        """ezmsg-sigproc's result on NumPy float64."""
        return filtered(self.make_theirs(), x.astype(np.float64), **fields)


TRANSFORMERS = {
    "EWMA": Habits(
        EWMATransformer,
        sigproc_ewma.EWMATransformer,
        EWMAUnit,
        settings=dict(time_constant=0.01),
        off=(dict(passthrough=True),),
        scenarios=AVERAGE_SCENARIOS,
        unread=(dict(time_constant=1e-6), dict(time_constant=10.0)),
    ),
    "scaler": Habits(
        AdaptiveStandardScalerTransformer,
        sigproc_scaler.AdaptiveStandardScalerTransformer,
        AdaptiveStandardScaler,
        settings=dict(time_constant=0.01),
        off=(dict(passthrough=True),),
        scenarios=AVERAGE_SCENARIOS,
        tolerance=1e-4,
    ),
    "Butterworth": Habits(
        ButterworthFilterTransformer,
        sigproc_butterworth.ButterworthFilterTransformer,
        ButterworthFilter,
        settings=dict(order=4, cuton=300.0, cutoff=5000.0, coef_type="sos"),
        off=(dict(order=0), dict(cuton=None, cutoff=None)),
        scenarios=DESIGN_SCENARIOS,
    ),
    "filter": Habits(
        FilterTransformer,
        sigproc_filter.FilterTransformer,
        Filter,
        settings=dict(coefs=BAND_PASS, coef_type="sos"),
        off=(dict(coefs=None),),
        scenarios={},
        needs_rate=False,
    ),
}
