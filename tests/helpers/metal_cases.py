"""What the kernels for Metal compute beyond what the other kernels are tested for, with references in float64."""

import mlx.core as mx
import numpy as np

from ezmsg.mlx.kernels.layout import LARGEST_SAMPLE, LARGEST_SCORED
from ezmsg.mlx.kernels.metal import ewma, zscore

from .ewma_cases import corrected, state_of
from .recurrences import alpha_of


def run_corrected(x, alpha, lengths, zi=None):
    """Bias-corrected averages of *x*, time first, in messages of *lengths*; and the last state in float64."""
    zi = mx.zeros((4, x.shape[1])) if zi is None else zi
    results, start = [], 0
    for n in (*lengths, len(x) - sum(lengths)):
        y, zi = ewma.run(mx.array(x[start : start + n]), alpha, zi, 0, ())
        results.append(np.array(y))
        start += n
    return np.concatenate(results), np.array(zi).astype(np.float64).reshape(2, 2, -1).sum(axis=1)


def check_corrected(x, alpha, lengths):
    """Each channel within 2e-6 of its largest average."""
    y, state = run_corrected(x, alpha, lengths)
    taken = np.abs(x) <= LARGEST_SAMPLE
    np.testing.assert_array_equal(y[~taken], x[~taken])
    for channel in range(x.shape[1]):
        good = taken[:, channel]
        if good.any():
            expected = corrected(x[good][:, [channel]], alpha)[:, 0]
            np.testing.assert_allclose(y[good, channel], expected, rtol=0, atol=2e-6 * np.abs(expected).max())
            last = (1 - alpha) * expected[-1] * state[1, channel]
            np.testing.assert_allclose(state[0, channel], last, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(state[1], -np.expm1(taken.sum(axis=0) * np.log1p(-alpha)), rtol=1e-6)


def scored(x, alpha):
    """z-scores of *x*, time first, in float64, one sample after the other; and the last mean, variance and weight."""
    mean, variance, weight = np.zeros((3, x.shape[1]))
    scores = x.astype(np.float64)
    for sample, score in zip(x.astype(np.float64), scores, strict=True):
        taken = np.flatnonzero(np.abs(sample) <= LARGEST_SCORED)
        after = weight[taken] + (1 - weight[taken]) * alpha
        share, rest = alpha / after, (1 - alpha) * weight[taken] / after
        delta = sample[taken] - mean[taken]
        variance[taken] = rest * (variance[taken] + share * delta**2)
        mean[taken] = np.where(share <= 0.5, mean[taken] + share * delta, sample[taken] - rest * delta)
        weight[taken] = after
        deviation = np.sqrt(variance[taken])
        score[taken] = np.divide(rest * delta, deviation, out=np.zeros_like(delta), where=deviation > 0)
    return scores, np.stack([mean, variance, weight])


def run_scores(x, alpha, lengths, zi=None):
    """z-scores of *x*, time first, in messages of *lengths*; and the last state in float64."""
    zi = mx.zeros((6, x.shape[1])) if zi is None else zi
    results, start = [], 0
    for n in (*lengths, len(x) - sum(lengths)):
        y, zi = zscore.run(mx.array(x[start : start + n]), alpha, zi, 0, ())
        results.append(np.array(y))
        start += n
    return np.concatenate(results), np.array(zi).astype(np.float64).reshape(3, 2, -1).sum(axis=1)


def check_scores(x, alpha, lengths):
    y, state = run_scores(x, alpha, lengths)
    expected, last = scored(x, alpha)
    taken = np.abs(x) <= LARGEST_SCORED
    np.testing.assert_array_equal(y[~taken], x[~taken])
    for channel in range(x.shape[1]):
        good = taken[:, channel]
        if good.any():
            np.testing.assert_allclose(y[good, channel], expected[good, channel], rtol=0, atol=1e-5)
    scale = np.sqrt(last[1]) + 1e-7 * np.abs(last[0])
    assert (np.abs(state[0] - last[0]) <= 1e-5 * scale + 1e-30).all()
    np.testing.assert_allclose(state[1:], last[1:], rtol=1e-5)


def check_long_memory_in_single_samples():
    """Each of 500 samples moves an average of 300 s by a thousandth of what float32 resolves there."""
    alpha = alpha_of(300.0)
    zi = state_of([[100.0]], alpha)
    for _ in range(500):
        _, zi = ewma.run(mx.array([[101.0]]), alpha, zi, 0, ())
    average = np.array(zi).astype(np.float64).sum() / (1 - alpha)
    np.testing.assert_allclose(average - 100.0, -np.expm1(500 * np.log1p(-alpha)), rtol=1e-3)
