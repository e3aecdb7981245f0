"""Speed on a GPU, each figure beside what it is held to: `python tests/gpu/speed.py`.

Ratios are taken within one run, against ``x + 1`` of the same array, evaluation and synchronisation included. The
floor is the bytes that must move over the bandwidth that a copy reaches on this device.
"""

import statistics
import time
from collections.abc import Callable

from support import ewma_chain as shared

import ezmsg.core as ez
import mlx.core as mx
import numpy as np
from ewma_chain_offline import make_chain
from ezmsg.util.messages.axisarray import AxisArray
from rich.console import Console
from rich.table import Table

from ezmsg.mlx import EWMATransformer, ReadLateTransformer, SimulatedAcquisitionSettings, simulated_acquisition
from ezmsg.mlx.ewma import ewma
from ezmsg.mlx.stream.convert import numpy_to_mlx


def microseconds(*functions: Callable[[], object], n: int = 100, repeats: int = 9) -> list[float]:
    """Median time a call of each function, taken in turns."""
    times: list[list[float]] = [[] for _ in functions]
    for repeat in range(repeats + 1):
        for function, collected in zip(functions, times, strict=True):
            begin = time.perf_counter()
            for _ in range(n):
                function()
            mx.synchronize()
            if repeat:
                collected.append((time.perf_counter() - begin) / n * 1e6)
    return [statistics.median(collected) for collected in times]


def evaluated(function: Callable[[], tuple[mx.array, ...]]) -> Callable[[], None]:
    def run() -> None:
        mx.eval(*function())
        mx.synchronize()

    return run


def enqueued(function: Callable[[], tuple[mx.array, ...]]) -> Callable[[], None]:
    """What the device takes, if that is more than what the host takes: the next call does not wait for this one."""
    return lambda: mx.async_eval(*function())


def bandwidth() -> float:
    """Bytes a second that a large ``x + 1`` reads and writes."""
    x = mx.zeros((1 << 29,))
    mx.eval(x)
    (time_us,) = microseconds(evaluated(lambda: (x + 1,)), n=5)
    return 2 * x.nbytes / time_us * 1e6


def starts(console: Console) -> None:
    """To be called before anything else has compiled a kernel."""
    table = Table("message", "ms", title="A stream's first messages: the first one compiles for all")
    transformer, dims, axes = EWMATransformer(), ["time", "ch"], {"time": AxisArray.TimeAxis(fs=30000.0)}
    for name, n_samples in (("first, 300 x 256", 300), ("second, 3000 x 256", 3000), ("third, 3000 x 256", 3000)):
        x = mx.zeros((n_samples, 256))
        mx.eval(x)
        begin = time.perf_counter()
        mx.eval(transformer(AxisArray(x, dims, axes)).data)
        table.add_row(name, f"{(time.perf_counter() - begin) * 1e3:.1f}")
    console.print(table)


def averages(console: Console) -> None:
    rate = bandwidth()
    table = Table(
        "shape", "x + 1, us", "ewma, us", "ratio", "held to", "floor, us", title=f"EWMA; {rate / 1e12:.2f} TB/s"
    )
    for shape, limit in (
        ((30, 256), 1.5),
        ((300, 256), 1.5),
        ((3000, 256), None),
        ((30000, 1024), 2.0),
        ((300000, 1024), 2.0),
    ):
        x = mx.array(np.random.default_rng(0).standard_normal(shape, np.float32)) * 1.0
        zi = mx.zeros((2, shape[1]))
        mx.eval(x, zi)
        n = 200 if x.size < 1e7 else 20
        plus, average = microseconds(evaluated(lambda: (x + 1,)), evaluated(lambda: ewma(x, 1e-3, zi, axis=0)), n=n)
        held = "-" if limit is None else f"{limit}"
        floor = 2 * x.nbytes / rate * 1e6
        table.add_row(f"{shape}", f"{plus:.0f}", f"{average:.0f}", f"{average / plus:.2f}", held, f"{floor:.1f}")
    x, zi = mx.array(np.ones((256, 300), np.float32)) * 1.0, mx.zeros((256, 2))
    mx.eval(x, zi)
    plus, average = microseconds(evaluated(lambda: (x + 1,)), evaluated(lambda: ewma(x, 1e-3, zi, axis=1)))
    table.add_row("(256, 300), time last", f"{plus:.0f}", f"{average:.0f}", f"{average / plus:.2f}", "-", "-")
    console.print(table)


def uploads(console: Console) -> None:
    table = Table("samples x 256", "source", "to float32 on the device, us", "MB", title="AsArray: NumPy to MLX")
    for n_samples in (300, 15000):
        counts = [np.random.default_rng(k).integers(-500, 500, (n_samples, 256), np.int16) for k in range(16)]
        for source in ("int16", "float32", "float64"):
            data = [array.astype(source) for array in counts]
            turn = iter(range(10**9))

            def convert(data: list[np.ndarray] = data) -> tuple[mx.array]:
                return (numpy_to_mlx(data[next(turn) % 16], "float32")[0] + 1,)

            (time_us,) = microseconds(evaluated(convert), n=50)
            table.add_row(f"{n_samples}", source, f"{time_us:.0f}", f"{data[0].nbytes / 1e6:.2f}")
    console.print(table)


def chain(console: Console) -> None:
    """The example chain at 300 x 256, after all bias corrections have settled."""
    settled = 1800
    messages = list(simulated_acquisition(SimulatedAcquisitionSettings(duration=40.0, stall_every=0)))
    table = Table("reading", "us a message", "times real time", "held to", title="Example chain, 300 x 256 int16")
    for late in (False, True, False, True):
        stages = make_chain(shared.to_mlx(512.0))
        if late:
            stages[-1] = ReadLateTransformer(depth=2)
        times = []
        for message in messages:
            begin = time.perf_counter()
            for stage in stages:
                message = stage(message)
            times.append(time.perf_counter() - begin)
        mean = statistics.mean(times[settled:]) * 1e6
        name, held = ("two messages late", 20) if late else ("at once (live)", 12)
        table.add_row(name, f"{mean:.0f}", f"{1e4 / mean:.1f}", f">= {held}")
    console.print(table)


def main() -> None:
    ez.logger.setLevel("WARNING")
    console = Console(width=110)
    console.print(f"MLX {mx.__version__}, {mx.device_info().get('device_name', mx.default_device())}")
    starts(console)
    averages(console)
    uploads(console)
    chain(console)


if __name__ == "__main__":
    main()
