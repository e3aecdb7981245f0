"""Synthetic intracortical recordings: field potentials, noise and spikes."""

import math

import numpy as np
import numpy.typing as npt

MICROVOLTS_PER_COUNT = 0.25
"""Microvolts per count of the simulated converter: that of Blackrock's 16-bit front ends."""

# Sizes typical of intracortical microelectrode arrays, in microvolts (noise and field potential: RMS, spikes: peak).
_NOISE = 8.0
_SHARED_FIELD_POTENTIAL = 40.0
_LOCAL_FIELD_POTENTIAL = 30.0
_SPIKE_RANGE = (60.0, 200.0)
_FIRING_RATE_RANGE = (1.0, 10.0)  # spikes a second, one neuron a channel
_REFRACTORY_PERIOD = 0.002  # s
_SPIKE_DURATION = 0.0016  # s

# The recording is played again and again: 32 MiB (2.2 s of 256 channels at 30 kHz), if that is 1 to 5 seconds.
_RECORDING_BYTES = 32 * 2**20
_RECORDING_SECONDS = (1.0, 5.0)


def make_recording(rate: float, n_channels: int, seed: int) -> npt.NDArray[np.int16]:
    """A few seconds of int16 counts, shape (time, ch), read-only, whose last sample goes on into the first.

    Args:
        rate: Sampling rate in Hz.
        n_channels: Number of channels.
        seed: The same seed gives the same samples, at the same rate and channel count.
    """
    rng = np.random.default_rng([seed, 0])
    shortest, longest = (seconds * rate for seconds in _RECORDING_SECONDS)
    # At least 1000 samples, for the field potential needs some spectrum at very low rates too.
    n_samples = int(max(min(_RECORDING_BYTES / (2 * n_channels), longest), shortest, 1000))

    sources, weights = _field_potential(rng, rate, n_samples, n_channels)
    recording = np.empty((n_samples, n_channels), np.int16)
    # In blocks, so that making the recording takes hardly more memory than the recording.
    for start in range(0, n_samples, 4096):
        block = recording[start : start + 4096]
        counts = rng.standard_normal(block.shape, np.float32)
        counts *= _NOISE / MICROVOLTS_PER_COUNT
        counts += sources[:, start : start + 4096].T @ weights
        block[:] = np.rint(counts, out=counts)
    _add_spikes(rng, rate, recording)
    # So that no view of it can be made writable again.
    recording.flags.writeable = False
    return recording


def _field_potential(
    rng: np.random.Generator, rate: float, n_samples: int, n_channels: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Slow sources (source, time) and their weights (source, ch) in counts.

    The power of each source is flat up to a knee at 2 Hz and falls with the square of the frequency above it, as the
    aperiodic part of field potentials does (Donoghue et al., Nature Neuroscience 2020). Made from its spectrum,
    it is periodic. Source 0 reaches all channels, the others a neighbourhood each.
    """
    n_sources = 16
    frequencies = np.fft.rfftfreq(n_samples, 1 / rate)
    spectrum = rng.standard_normal((n_sources, 2 * len(frequencies)), np.float32).view(np.complex64)
    spectrum /= np.hypot(1, frequencies / 2.0)
    spectrum[:, 0] = 0
    sources = np.fft.irfft(spectrum, n_samples).astype(np.float32, copy=False)
    sources /= sources.std(axis=1, keepdims=True)

    centres = np.linspace(0, n_channels, n_sources - 1)[:, np.newaxis]
    distances = (np.arange(n_channels) - centres) / (n_channels / n_sources)
    local = np.exp(-0.5 * distances**2)
    local *= _LOCAL_FIELD_POTENTIAL / np.linalg.norm(local, axis=0)
    shared = _SHARED_FIELD_POTENTIAL * rng.uniform(0.8, 1.2, (1, n_channels))
    weights = np.concatenate([shared, local]) / MICROVOLTS_PER_COUNT
    return sources, weights.astype(np.float32)


def _add_spikes(rng: np.random.Generator, rate: float, recording: npt.NDArray[np.int16]) -> None:
    """Add to each channel the spikes of a neuron that fires at random but for its refractory period, in place."""
    n_samples, n_channels = recording.shape
    seconds = np.arange(math.ceil(_SPIKE_DURATION * rate)) / rate
    # A sharp trough of 0.2 ms at half depth, then a rounder and lower hump: the extracellular action potential.
    waveform = 0.3 * np.exp(-0.5 * ((seconds - 0.0008) / 0.0002) ** 2) - np.exp(-0.5 * ((seconds - 0.0004) / 8e-5) ** 2)

    duration = n_samples / rate
    low, high = _FIRING_RATE_RANGE
    n_spikes = rng.poisson(duration * low * (high / low) ** rng.uniform(size=n_channels))
    channels = np.repeat(np.arange(n_channels), n_spikes)
    # Uniform times in what the refractory periods leave, moved apart by them afterwards: also across the end.
    fired = [
        np.sort(rng.uniform(0, duration - n * _REFRACTORY_PERIOD, n)) + np.arange(n) * _REFRACTORY_PERIOD
        for n in n_spikes
    ]
    starts = (np.concatenate(fired) * rate).astype(np.int64)
    lowest, highest = _SPIKE_RANGE
    peaks = np.asarray(rng.uniform(lowest, highest, n_channels)) / MICROVOLTS_PER_COUNT
    times = (starts[:, np.newaxis] + np.arange(len(waveform))) % n_samples
    counts = np.rint(peaks[channels][:, np.newaxis] * waveform).astype(np.int16)
    # += takes one addition a sample. That is enough, since spikes are shorter than the refractory period.
    recording[times, channels[:, np.newaxis]] += counts
