"""Band power from a simulated recording, as an ezmsg graph of two processes.

What computes with MLX is one Collection in a process of its own; only NumPy arrays cross.

pip install "ezmsg-mlx[cpu]"
python graph.py
"""

import argparse
import multiprocessing

import ezmsg.core as ez
from ezmsg.util.messages.axisarray import AxisArray

import ezmsg.mlx as mlx
from ezmsg.mlx.stream.convert import import_mlx


class Features(ez.Collection):
    """From int16 counts (time, ch) to float32 power (time, ch)."""

    INPUT_SIGNAL = ez.InputTopic(AxisArray)
    OUTPUT_SIGNAL = ez.OutputTopic(AxisArray)

    TO_MLX = mlx.AsArray(mlx.AsArraySettings(backend="mlx", dtype="float32", mlx_cache_limit_mb=128))
    DETREND = mlx.DetrendUnit(mlx.EWMASettings(time_constant=1.0))
    SQUARE = mlx.Pow(mlx.PowSettings(exponent=2.0))
    POWER = mlx.EWMAUnit(mlx.EWMASettings(time_constant=0.1))
    TO_NUMPY = mlx.AsArray(mlx.AsArraySettings(backend="numpy"))

    def network(self) -> ez.NetworkDefinition:
        units = (self.TO_MLX, self.DETREND, self.SQUARE, self.POWER, self.TO_NUMPY)
        return (
            (self.INPUT_SIGNAL, self.TO_MLX.INPUT_SIGNAL),
            *((a.OUTPUT_SIGNAL, b.INPUT_SIGNAL) for a, b in zip(units, units[1:])),
            (self.TO_NUMPY.OUTPUT_SIGNAL, self.OUTPUT_SIGNAL),
        )


class Sink(ez.Unit):
    """Prints the power of one channel, and ends the graph after the last sample."""

    SETTINGS = mlx.SimulatedAcquisitionSettings
    INPUT_SIGNAL = ez.InputStream(AxisArray)

    @ez.subscriber(INPUT_SIGNAL)
    async def on_signal(self, message: AxisArray) -> None:
        time = message.axes["time"]
        end = time.value(len(message.data))
        if int(2 * end) > int(2 * time.offset):
            print(f"{end:.2f} s: power of channel 0 is {message.data[-1, 0]:.1f} counts squared", flush=True)
        if end > self.SETTINGS.duration - time.gain / 2:
            raise ez.NormalTermination


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of the recording [3]")
    seconds = parser.parse_args().seconds
    try:
        import_mlx()
    except ImportError as error:
        parser.exit(1, f"{error}\n")
    stream = mlx.SimulatedAcquisitionSettings(n_channels=64, stall_every=50, duration=seconds, real_time=True)
    source, features, sink = mlx.SimulatedAcquisition(stream), Features(), Sink(stream)
    ez.run(
        SOURCE=source,
        FEATURES=features,
        SINK=sink,
        connections=((source.OUTPUT_SIGNAL, features.INPUT_SIGNAL), (features.OUTPUT_SIGNAL, sink.INPUT_SIGNAL)),
        process_components=(features,),
        graph_address=("127.0.0.1", 0),
        auto_start=True,
    )


if __name__ == "__main__":
    # A forked child of a process that has used MLX hangs.
    multiprocessing.set_start_method("spawn", force=True)
    main()
