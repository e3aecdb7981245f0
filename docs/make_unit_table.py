"""Run every unit of ezmsg-sigproc on MLX data, and write down what it does with it.

    python docs/make_unit_table.py

writes ``docs/units_table.md``. Each unit of ``unit_cases.py`` gets the same stream twice, as NumPy and as MLX arrays,
on MLX's CPU device, and the results are compared. Then those that take MLX data run in a graph, which tells whether
they publish as much.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
from ezmsg.util.messages.axisarray import AxisArray
from unit_cases import N_CHANNELS, N_SAMPLES, NOT_RUN, RATE, Case, Result, cases
from unit_graph import Planned, in_a_graph

__all__ = ["NOT_RUN", "TABLE", "cases", "main", "outcome", "table"]

TABLE = Path(__file__).parent / "units_table.md"

N_MESSAGES = 4

TOLERANCE = 1e-3
"""Of the largest value: results in float32, of filters that NumPy computes in float64."""


def _stream(case: Case, mlx: bool) -> Iterator[AxisArray]:
    import mlx.core as mx

    rng = np.random.default_rng(0)
    channels = AxisArray.CoordinateAxis(data=np.array([f"ch{i}" for i in range(N_CHANNELS)]), dims=["ch"])
    for number in range(N_MESSAGES):
        noise = rng.standard_normal((N_SAMPLES, N_CHANNELS)).astype(np.float32)
        data = np.ascontiguousarray(case.prepare(noise).astype(np.float32))
        time = AxisArray.TimeAxis(fs=RATE, offset=number * N_SAMPLES / RATE)
        yield case.adapt(
            AxisArray(
                data=mx.array(data) if mlx else data,
                dims=["time", "ch"],
                axes={"time": time, "ch": channels},
                key="noise",
                stream_dim="time",
            )
        )


def _arrays(result: Result) -> Iterator[object]:
    if isinstance(result, AxisArray):
        if 0 not in result.data.shape:
            yield result.data
    elif isinstance(result, (list, tuple)):
        for part in result:
            yield from _arrays(part)


def _run(case: Case, mlx: bool) -> list[object]:
    call = case.make()
    return [array for message in _stream(case, mlx) for array in _arrays(call(message))]


class _HostReads:
    """Counts how often NumPy makes an array of an MLX array while it is entered."""

    NAMES = ("array", "asarray", "asanyarray", "ascontiguousarray")

    def __enter__(self) -> "_HostReads":
        import mlx.core as mx

        self.n = 0
        self._found = {name: getattr(np, name) for name in self.NAMES}
        for name, function in self._found.items():

            def counting(first: object = None, *args: object, _function: Callable = function, **kwargs: object):
                self.n += isinstance(first, mx.array)
                return _function(first, *args, **kwargs)

            setattr(np, name, functools.wraps(function)(counting))
        return self

    def __exit__(self, *exception: object) -> None:
        for name, function in self._found.items():
            setattr(np, name, function)


def outcome(case: Case) -> tuple[str, str]:
    """What the unit of *case* does with MLX data, in a few words, and a remark."""
    import mlx.core as mx

    expected = [np.asarray(array) for array in _run(case, mlx=False)]
    if not expected:
        raise RuntimeError(f"{case.unit} gave nothing for NumPy data, so there is nothing to compare with.")
    try:
        with _HostReads() as reads:
            results = _run(case, mlx=True)
            n_reads = reads.n
            values = [np.array(array) for array in results]
    except Exception as error:
        # Not its text, which is another one in other versions of Python and of what it calls.
        return "refuses", f"`{type(error).__name__}`"
    if len(values) != len(expected) or any(a.shape != b.shape for a, b in zip(values, expected, strict=True)):
        return "wrong", "other shapes than with NumPy"
    error = max((_error(a, b) for a, b in zip(values, expected, strict=True)), default=0.0)
    if not error <= TOLERANCE:
        if not np.isfinite(error):
            return "wrong", "not finite"
        return "wrong", f"off by more than {10.0 ** math.floor(math.log10(error)):.0e} of the largest value"
    if not all(isinstance(array, mx.array) for array in results):
        return "goes through the host", "gives NumPy arrays"
    if n_reads:
        return "goes through the host", "gives MLX arrays"
    return "stays in MLX", ""


def _error(values: np.ndarray, expected: np.ndarray) -> float:
    if expected.dtype.kind in "USO":
        return 0.0 if np.array_equal(values, expected) else np.inf
    scale = np.abs(expected).max() or 1.0
    return float(np.abs(values.astype(complex) - expected).max() / scale)


def _in_a_graph(chosen: Sequence[Case]) -> list[str]:
    """What each of *chosen* does in a graph with MLX data."""
    planned = []
    for case in chosen:
        call = case.make()
        n_values = sum(array.size for array in _run(case, mlx=True))
        planned.append(
            Planned(case.unit, getattr(call, "settings", None), list(_stream(case, mlx=True)), n_values, case.inputs)
        )
    return in_a_graph(planned)


def table() -> str:
    """The table in Markdown. Sets MLX's default device, and runs a graph."""
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    versions = f"ezmsg-sigproc {metadata.version('ezmsg-sigproc')} on MLX {metadata.version('mlx')}, CPU backend"
    lines = [f"Made by `python docs/make_unit_table.py` with {versions}.", ""]
    lines += ["| unit | settings | with MLX data | in a graph | in this package |", "|---|---|---|---|---|"]
    outcomes = [(case, *outcome(case)) for case in cases()]
    runnable = [number for number, (case, what, _) in enumerate(outcomes) if case.inputs and what != "refuses"]
    published = dict(zip(runnable, _in_a_graph([outcomes[number][0] for number in runnable]), strict=True))
    for number, (case, what, remark) in enumerate(outcomes):
        module, _, name = case.unit.rpartition(".")
        found = f"**{what}**: {remark}" if remark else what
        lines.append(
            f"| `{name}` of `{module}` | {case.settings} | {found} | {published.get(number, '')} | {case.instead} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    warnings.simplefilter("ignore")
    TABLE.write_text(table(), encoding="utf-8")
    print(f"Wrote {TABLE}.")


if __name__ == "__main__":
    sys.exit(main())
