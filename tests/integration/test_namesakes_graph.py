"""Units with two inputs, collections and composites in a running graph: they publish what they give when called bare.

The graph is this file run as a script in a process of its own.
"""

import sys
import typing
import warnings

import ezmsg.core as ez
import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray
from helpers.ports import free_port

FS = 1000.0
N_MESSAGES, N_SAMPLES, N_CHANNELS = 20, 50, 3
BAND = {"order": 2, "cuton": 30.0, "cutoff": 100.0, "coef_type": "sos"}
EXPECTED = {"DECIMATE": 250, "POWER": 20, "RESAMPLE": 500, "JOINED": 900}
"""Samples of each after which all is there; of those that lag behind the last ones are not waited for."""


def messages(name: str) -> typing.Iterator[AxisArray]:
    import mlx.core as mx

    rng = np.random.default_rng(len(name))
    channels = AxisArray.CoordinateAxis(data=np.array([f"{name}{i}" for i in range(N_CHANNELS)]), dims=["ch"])
    for number in range(N_MESSAGES):
        data = mx.array(rng.standard_normal((N_SAMPLES, N_CHANNELS)).astype(np.float32))
        time = AxisArray.TimeAxis(fs=FS, offset=number * N_SAMPLES / FS + 0.0003 * (name == "reference"))
        yield AxisArray(data, ["time", "ch"], axes={"time": time, "ch": channels}, key=name, stream_dim="time")


class SourceSettings(ez.Settings):
    name: str


class Source(ez.Unit):
    SETTINGS = SourceSettings
    OUTPUT_SIGNAL = ez.OutputStream(AxisArray)

    @ez.publisher(OUTPUT_SIGNAL)
    async def send(self) -> typing.AsyncGenerator:
        for message in messages(self.SETTINGS.name):
            yield self.OUTPUT_SIGNAL, message


class SinkSettings(ez.Settings):
    output: str


class SinkState(ez.State):
    pieces: dict


class Sink(ez.Unit):
    SETTINGS = SinkSettings
    STATE = SinkState
    INPUT_DECIMATE = ez.InputStream(AxisArray)
    INPUT_POWER = ez.InputStream(AxisArray)
    INPUT_RESAMPLE = ez.InputStream(AxisArray)
    INPUT_JOINED = ez.InputStream(AxisArray)

    async def initialize(self) -> None:
        self.STATE.pieces = {name: [] for name in EXPECTED}

    def take(self, name: str, message: AxisArray) -> None:
        self.STATE.pieces[name].append(np.array(message.data))
        lengths = {name: sum(map(len, pieces)) for name, pieces in self.STATE.pieces.items()}
        if all(lengths[name] >= n for name, n in EXPECTED.items()):
            np.savez(self.SETTINGS.output, **{name: np.concatenate(p) for name, p in self.STATE.pieces.items()})
            raise ez.NormalTermination

    @ez.subscriber(INPUT_DECIMATE)
    async def decimate(self, message: AxisArray) -> None:
        self.take("DECIMATE", message)

    @ez.subscriber(INPUT_POWER)
    async def power(self, message: AxisArray) -> None:
        self.take("POWER", message)

    @ez.subscriber(INPUT_RESAMPLE)
    async def resample(self, message: AxisArray) -> None:
        self.take("RESAMPLE", message)

    @ez.subscriber(INPUT_JOINED)
    async def joined(self, message: AxisArray) -> None:
        self.take("JOINED", message)


def run_graph(output: str) -> None:
    import ezmsg.mlx as package

    warnings.simplefilter("ignore")
    signal, reference, sink = Source(name="signal"), Source(name="reference"), Sink(SinkSettings(output=output))
    decimate = package.Decimate(factor=4)
    power = package.RMSBandPower(bandpass=package.ButterworthFilterSettings(**BAND))
    resample, joined = package.ResampleUnit(resample_rate=500.0), package.ResampleConcat()
    ez.run(
        SIGNAL=signal,
        REFERENCE=reference,
        DECIMATE=decimate,
        POWER=power,
        RESAMPLE=resample,
        JOINED=joined,
        SINK=sink,
        connections=(
            (signal.OUTPUT_SIGNAL, decimate.INPUT_SIGNAL),
            (signal.OUTPUT_SIGNAL, power.INPUT_SIGNAL),
            (signal.OUTPUT_SIGNAL, resample.INPUT_SIGNAL),
            (signal.OUTPUT_SIGNAL, joined.INPUT_SIGNAL),
            (reference.OUTPUT_SIGNAL, joined.INPUT_REFERENCE),
            (decimate.OUTPUT_SIGNAL, sink.INPUT_DECIMATE),
            (power.OUTPUT_SIGNAL, sink.INPUT_POWER),
            (resample.OUTPUT_SIGNAL, sink.INPUT_RESAMPLE),
            (joined.OUTPUT_SIGNAL, sink.INPUT_JOINED),
        ),
        graph_address=("127.0.0.1", free_port()),
        auto_start=True,
    )


def test_units_publish_what_they_give_when_called_bare(tmp_path):
    pytest.importorskip("mlx.core")
    from ezmsg.sigproc.downsample import DownsampleTransformer
    from helpers import warm

    import ezmsg.mlx as package

    output = tmp_path / "received.npz"
    done = warm.run([__file__, str(output)])
    assert output.exists(), done.stdout + done.stderr
    received = np.load(output)
    warnings.simplefilter("ignore")

    def chained(*stages):
        results = []
        for message in messages("signal"):
            for stage in stages:
                message = stage(message)
            results.append(np.array(message.data))
        return np.concatenate(results)

    cheby = package.ChebyForDecimateTransformer(order=8, ripple_tol=0.05, Wn=0.2, wn_hz=False)
    expected = {
        "DECIMATE": chained(cheby, DownsampleTransformer(factor=4)),
        "POWER": chained(package.RMSBandPowerTransformer(bandpass=package.ButterworthFilterSettings(**BAND))),
        "RESAMPLE": chained(package.ResampleProcessor(resample_rate=500.0).send),
    }
    for name, values in expected.items():
        found = received[name]
        np.testing.assert_allclose(found, values[: len(found)], rtol=0, atol=1e-5 * np.abs(values).max(), err_msg=name)
    assert received["JOINED"].shape[1] == 2 * N_CHANNELS
    # The reference is as it was: half of the channels have its samples.
    reference = np.concatenate([np.array(message.data) for message in messages("reference")])
    np.testing.assert_array_equal(received["JOINED"][:, :N_CHANNELS], reference[: len(received["JOINED"])])


if __name__ == "__main__":
    run_graph(*sys.argv[1:])
