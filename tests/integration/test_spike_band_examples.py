"""The spike-band examples, run as a user runs them."""

import re

from support import ewma_chain

import numpy as np
import pytest
import spike_band_power
from helpers import reference
from helpers.scripts import Script
from scipy.signal import butter, sosfilt, sosfilt_zi

from ezmsg.mlx import SimulatedAcquisitionSettings, simulated_acquisition

pytest.importorskip("mlx.core")

STREAM = SimulatedAcquisitionSettings(duration=1.5, n_channels=8, stall_every=40, seed=3)
OPTIONS = ("--duration", "1.5", "--channels", "8", "--stall-every", "40", "--seed", "3")


def z_scores() -> np.ndarray:
    """The chain in float64, by NumPy and SciPy alone and over the whole recording at once."""
    counts = np.concatenate([message.data for message in simulated_acquisition(STREAM)]).astype(np.float64)
    band, rate = spike_band_power.BAND, STREAM.sampling_rate
    sos = butter(band.order, (band.cuton, band.cutoff), "bandpass", fs=rate, output="sos")
    filtered, _ = sosfilt(sos, counts, axis=0, zi=sosfilt_zi(sos)[..., None] * counts[0])
    power = reference.ewma(filtered**2, rate, spike_band_power.POWER.time_constant)
    n = round(ewma_chain.BIN.bin_duration * rate)
    bins = power[: len(power) // n * n].reshape(-1, n, power.shape[1]).mean(axis=1)
    log = np.log10(bins)
    mean, square = (reference.ewma(x, rate / n, spike_band_power.SCORE.time_constant) for x in (log, log**2))
    with np.errstate(invalid="ignore"):
        return np.where(square > mean**2, (log - mean) / np.sqrt(square - mean**2), 0.0)


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("offline")
    script = Script("spike_band_power.py", *OPTIONS, "--save", f"{folder}/scores.npy", "--plot", f"{folder}/spikes.png")
    try:
        return script.finish(), folder
    finally:
        script.kill()


def test_the_scores_follow_the_float64_reference(offline):
    (code, out, _), folder = offline
    assert code == 0
    assert re.search(r"^stream +1\.50 s$", out, re.MULTILINE)
    scores, expected = np.load(folder / "scores.npy"), z_scores()
    assert scores.dtype == np.float32
    assert scores.shape == expected.shape == (150, 8)
    # A variance of few values is a small difference: the first scores amplify what float32 rounds.
    np.testing.assert_allclose(scores[20:], expected[20:], rtol=0, atol=1e-3)
    assert np.isfinite(scores).all()


def test_the_picture_shows_something(offline):
    figures = pytest.importorskip("matplotlib.pyplot")
    picture = figures.imread(offline[1] / "spikes.png")
    assert min(picture.shape[:2]) > 500
    assert np.ptp(picture[..., :3]) > 0.5
    # Each colour as one number, since numpy sorts rows slowly.
    colours = np.rint(picture[..., :3] * 255).astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
    assert len(np.unique(colours)) > 20


def test_the_graph_gives_the_same_scores_and_leaves_nothing_behind(offline, start, tmp_path):
    script = start("spike_band_power_graph.py", *OPTIONS, "--real-time", "--save", f"{tmp_path}/scores.npy")
    script.read_until("x real time")
    script.note_segments()
    code, _, err = script.finish()
    assert (code, err) == (0, "")
    script.assert_nothing_left()
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), np.load(offline[1] / "scores.npy"))
