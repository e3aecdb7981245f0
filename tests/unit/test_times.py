"""Times are computed in float64, whatever the scalar types of gains, offsets and rates."""

import numpy as np
import pytest
from ezmsg.util.messages.axisarray import AxisArray

from ezmsg.mlx import (
    EWMATransformer,
    RechunkSettings,
    RechunkTransformer,
    SimulatedAcquisitionSettings,
    ZarrSink,
    measure_working_set,
    simulated_acquisition,
)

RATE = 30000.0
SCALARS = pytest.mark.parametrize("scalar", [float, np.float32, np.float64, np.longdouble])
STARTS = pytest.mark.parametrize("start", [0.0, 3 * 3600.0 + 1e-5, 1.7e9 + 0.1], ids=["0", "3 h", "Unix"])


def message(data: np.ndarray, gain: float, offset: float) -> AxisArray:
    axis = AxisArray.LinearAxis(unit="s", gain=gain, offset=offset)
    return AxisArray(data=data, dims=["time", "ch"], axes={"time": axis}, stream_dim="time")


@SCALARS
@STARTS
def test_rechunk_sees_no_gaps_that_are_not_there(scalar, start):
    step = RechunkTransformer(RechunkSettings(sizes=(300,)))
    pieces = []
    for first in range(0, 40 * 310, 310):
        pieces += step(message(np.zeros((310, 2), np.float32), scalar(1 / RATE), start + first / RATE))
    assert {len(piece.data) for piece in pieces} == {300}
    for number, piece in enumerate(pieces):
        assert type(piece.axes["time"].offset) is float
        assert abs((piece.axes["time"].offset - start) * RATE - 300 * number) < 0.01


@SCALARS
@STARTS
def test_times_of_results_are_exact_to_a_hundredth_of_a_sample(tmp_path, scalar, start):
    zarr = pytest.importorskip("zarr")
    sink = ZarrSink(tmp_path / "results.zarr")
    sink.open("recipe", "fingerprint")
    for first in range(0, 1200, 300):
        sink.append(message(np.zeros((300, 2), np.float32), scalar(1 / RATE), start + first / RATE))
    sink.commit()
    sink.close()
    times = zarr.open_group(str(tmp_path / "results.zarr"), mode="r")["time"][:]
    np.testing.assert_allclose((times - start) * RATE, np.arange(1200), rtol=0, atol=0.01)


@SCALARS
def test_a_repeated_message_makes_a_stream_without_gaps(scalar):
    pytest.importorskip("mlx.core")
    offsets = []

    def note(given):
        offsets.append(given.axes["time"].offset)
        return given

    start = 3 * 3600.0
    measure_working_set(note, message(np.zeros((310, 2), np.float32), scalar(1 / RATE), start), repetitions=5)
    expected = 310 * np.arange(5)
    np.testing.assert_allclose((np.array(offsets) - start) * RATE, expected, rtol=0, atol=0.01)


def test_a_rate_that_changes_its_type_alone_keeps_the_state():
    step = EWMATransformer(time_constant=10.0)
    data = np.ones((300, 2), np.float32)
    step(message(data, 1 / RATE, 0.0))
    step(message(np.zeros_like(data), np.float32(1 / RATE), 300 / RATE))
    # A state that began anew would be all zeros.
    last = np.asarray(step(message(np.zeros_like(data), 1 / RATE, 600 / RATE)).data)
    assert (last > 0.1).all()


@SCALARS
def test_a_simulated_stream_has_exact_offsets(scalar):
    settings = SimulatedAcquisitionSettings(sampling_rate=scalar(RATE), n_channels=1, duration=scalar(2.0))
    places = 0
    for given in simulated_acquisition(settings):
        assert abs(float(given.axes["time"].offset) * RATE - places) < 0.01
        places += len(given.data)
    assert places == 60000
