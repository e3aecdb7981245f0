"""Changes of settings in a running stream, for each transformer that may see them, and how they are made.

A row of :data:`CHANGES` is run by all tests of test_changed_settings.py; a unit that is added needs a row here.
"""

import asyncio
import dataclasses
from collections.abc import Iterator

import mlx.core as mx
import numpy as np
from ezmsg.baseproc import BaseTransformer
from ezmsg.util.messages.axisarray import AxisArray

import ezmsg.mlx as package

from .recurrences import BAND_PASS, FS

LOW_PASS = (np.array([0.25, 0.25]), np.array([1.0, -0.5]))


@dataclasses.dataclass(frozen=True)
class Change:
    name: str
    """Of the transformer without "Transformer"."""

    before: dict[str, object]
    after: dict[str, object]
    """The fields that change."""

    tolerance: float = 1e-5

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.after)}"


BUTTERWORTH = {"order": 4, "cuton": 300.0, "cutoff": 5000.0}
CHEBYSHEV = {"order": 3, "ripple_tol": 1.0, "Wn": (300.0, 5000.0), "btype": "bandpass"}
FILTER = {"coefs": BAND_PASS, "coef_type": "sos"}
AVERAGE = {"time_constant": 0.002}

CHANGES = [
    *(
        Change("ButterworthFilter", {**BUTTERWORTH, "coef_type": coef_type}, after)
        for coef_type in ("ba", "sos")
        for after in (
            {"cuton": 500.0},
            {"order": 2},
            {"order": 1, "cuton": None},
            {"order": 3, "coef_type": "ba"},
            {"order": 2, "coef_type": "sos"},
            {"cutoff": 0.2, "cuton": 0.02, "wn_hz": False},
            {"use_mlx_metal": False, "cuton": 400.0},
            {"use_fast_sosfilt": False, "thread_min_bytes": 0},
            {"order": 0},
        )
    ),
    *(
        Change("ChebyshevFilter", {**CHEBYSHEV, "coef_type": coef_type}, after)
        for coef_type in ("ba", "sos")
        for after in (
            {"Wn": (500.0, 4000.0)},
            {"cheby_type": "cheby2", "ripple_tol": 30.0},
            {"btype": "lowpass", "Wn": 3000.0, "order": 2},
            {"order": 2, "coef_type": "sos"},
            {"order": 4, "coef_type": "ba"},
        )
    ),
    Change("Filter", FILTER, {"coefs": BAND_PASS[::-1].copy()}),
    Change("Filter", FILTER, {"coefs": BAND_PASS[:2]}),
    Change("Filter", FILTER, {"coefs": LOW_PASS, "coef_type": "ba"}),
    Change("Filter", {"coefs": LOW_PASS}, {"coefs": (np.array([0.25, 0.5, 0.25]), np.array([1.0]))}),
    Change("Filter", {"coefs": LOW_PASS}, {"coefs": (np.array([0.25, 0.25]), np.array([1.0, 0.0]))}),
    Change("Filter", {"coefs": LOW_PASS}, {"coefs": BAND_PASS, "coef_type": "sos"}),
    Change("Filter", {"coefs": (np.ones(3) / 3, np.array([1.0]))}, {"coefs": (np.ones(80) / 80, np.array([1.0]))}),
    Change("Filter", {"coefs": (np.ones(3) / 3, np.array([1.0]))}, {"fir_fft_min_taps": 2}),
    Change("Filter", FILTER, {"coefs": None}),
    Change("EWMA", AVERAGE, {"time_constant": 0.004}),
    Change("EWMA", AVERAGE, {"mlx_metal_chunk_sizes": (8, 64)}),
    Change("EWMA", AVERAGE, {"passthrough": True}),
    Change("AdaptiveStandardScaler", AVERAGE, {"time_constant": 0.004}, 1e-4),
    Change("AdaptiveStandardScaler", AVERAGE, {"passthrough": True}, 1e-4),
    Change("Rechunk", {"sizes": (100,)}, {"sizes": (30, 60)}),
    Change("Rechunk", {"sizes": (64,)}, {"sizes": (64,), "remainder": "emit"}),
    Change("Rechunk", {"sizes": (100,), "remainder": "emit"}, {"sizes": (75,), "remainder": "carry"}),
    Change("ReadLate", {"depth": 2}, {"depth": 0}),
    Change("ReadLate", {"depth": 0}, {"depth": 3}),
    Change("ReadLate", {"depth": 1}, {"dtype": "float64"}),
    Change("AsArray", {"backend": "numpy"}, {"backend": "mlx"}),
    Change("AsArray", {"backend": "mlx"}, {"backend": "numpy"}),
    Change("AsArray", {"backend": "mlx"}, {"dtype": "float16"}),
    Change("AsArray", {"backend": "mlx", "dtype": "float16"}, {"backend": "numpy", "dtype": "float64"}),
]

IMPOSSIBLE = [
    Change("ButterworthFilter", BUTTERWORTH, {"cutoff": 20000.0}),
    Change("ButterworthFilter", {**BUTTERWORTH, "coef_type": "sos"}, {"cuton": None, "cutoff": 15000.0}),
    Change("ButterworthFilter", {**BUTTERWORTH, "coef_type": "sos"}, {"wn_hz": False}),
    Change("ButterworthFilter", BUTTERWORTH, {"axis": "nowhere"}),
    Change("ChebyshevFilter", CHEBYSHEV, {"Wn": (300.0, 20000.0)}),
    Change("ChebyshevFilter", CHEBYSHEV, {"btype": "lowpass"}),
    Change("ChebyshevFilter", CHEBYSHEV, {"ripple_tol": None}),
    Change("Filter", FILTER, {"axis": "nowhere"}),
    Change("EWMA", AVERAGE, {"axis": "nowhere"}),
    Change("AdaptiveStandardScaler", AVERAGE, {"axis": "nowhere"}),
]
"""Settings that the settings themselves cannot refuse, since it takes a message to know."""


# One for all, since making one takes longer than most messages.
_LOOP = asyncio.new_event_loop()


class Running:
    """A transformer whose settings change as *how* says: called bare, or as the units do it on a settings message."""

    def __init__(self, name: str, settings: dict[str, object], how: str) -> None:
        self._how = how
        if how == "bare":
            self._transformer: BaseTransformer = getattr(package, f"{name}Transformer")(**settings)
        else:
            self._unit = getattr(package, name if hasattr(package, name) else f"{name}Unit")(**settings)
            self._unit._set_name(name)
            self._unit._set_location([])
            self._unit.create_processor()

    @property
    def transformer(self) -> BaseTransformer:
        return self._transformer if self._how == "bare" else self._unit.processor

    def change(self, **fields: object) -> None:
        new = dataclasses.replace(self.transformer.settings, **fields)
        if self._how == "bare":
            self.transformer.update_settings(new)
        else:
            _LOOP.run_until_complete(self._unit.on_settings(new))
            assert self._unit.SETTINGS is new

    def __call__(self, message: AxisArray) -> list[AxisArray]:
        """The results of a message, in a list whether there are none, one or several."""
        bare = self._how == "bare"
        result = self.transformer(message) if bare else _LOOP.run_until_complete(self.transformer.__acall__(message))
        return result if isinstance(result, list) else [result]


def stream(x: np.ndarray, kind: str, length: int = 600, start: int = 0) -> Iterator[AxisArray]:
    """Messages of *length* samples: MLX float32 or NumPy float64 data, by *kind*."""
    for begin in range(0, len(x), length):
        piece = x[begin : begin + length]
        yield AxisArray(
            mx.array(piece) if kind == "mlx" else piece.astype(np.float64),
            dims=["time", "ch"],
            axes={"time": AxisArray.TimeAxis(fs=FS, offset=(start + begin) / FS)},
            stream_dim="time",
        )
