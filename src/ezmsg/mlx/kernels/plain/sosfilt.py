"""Second-order sections in plain MLX operations, for any device: a scan in log2(chunk size) steps for each section.

The scan runs on the state of :mod:`ezmsg.mlx.kernels.sections`: on its difference from that at the start of the chunk,
which is a pair of float32.
"""

from __future__ import annotations

import dataclasses
import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ...scan import chunked_scan
from ..contract import Proof
from ..layout import LARGEST_SAMPLE, time_back, time_first, two_sum
from ..sections import DifferenceForm

MAX_STEPS = 9
"""Steps of the scan over the largest chunk, of 512 samples."""

Pair = tuple[mx.array, mx.array]


@dataclasses.dataclass(frozen=True)
class _Matrix:
    """A 2 x 2 matrix for states of shape (2, time, channel)."""

    diagonal: mx.array
    swapped: mx.array

    @classmethod
    def of(cls, values: npt.NDArray[np.float64]) -> _Matrix:
        halves = (values[[0, 1], [0, 1]], values[[0, 1], [1, 0]])
        return cls(*(mx.array(half.astype(np.float32)[:, None, None]) for half in halves))

    def __matmul__(self, states: mx.array) -> mx.array:
        return self.diagonal * states + self.swapped * states[::-1]


@dataclasses.dataclass(frozen=True)
class _Section:
    """A :class:`~ezmsg.mlx.kernels.sections.DifferenceForm` in float32."""

    mirrored: bool
    b0: float
    inputs: mx.array
    change: _Matrix
    transitions: tuple[_Matrix, ...]
    """Over 1, 2, 4, ... samples."""

    @classmethod
    def of(cls, row: npt.NDArray[np.float64]) -> _Section:
        form = DifferenceForm.of(row)
        transitions = [form.transition]
        for _ in range(MAX_STEPS - 1):
            transitions.append(transitions[-1] @ transitions[-1])
        return cls(
            form.mirrored,
            form.b0,
            mx.array(form.inputs.astype(np.float32)[:, None, None]),
            _Matrix.of(form.change),
            tuple(_Matrix.of(transition) for transition in transitions),
        )

    def run(self, x: mx.array, start: Pair, count: mx.array) -> tuple[mx.array, Pair]:
        """Over *x* (time, channel) from *start* (2, 1, channel); the state after *count* samples of each channel."""
        size = x.shape[0]
        high, low = start
        if self.mirrored:
            signs = (1 - 2 * (mx.arange(size + 1) % 2)).astype(mx.float32)
            x = x * signs[:size, None]
        difference = self.inputs * x + (self.change @ high + self.change @ low)
        for i, transition in enumerate(self.transitions):
            step = 1 << i
            if step >= size:
                break
            earlier = transition @ difference[:, : size - step]
            difference = difference + mx.pad(earlier, [(0, 0), (step, 0), (0, 0)])
        # Of the state before each sample, and after the last.
        difference = mx.pad(difference, [(0, 0), (1, 0), (0, 0)])
        y = (self.b0 * x + high[0]) + (low[0] + difference[0, :size])
        last = mx.take_along_axis(difference, mx.broadcast_to(count, (2, *count.shape)), axis=1)
        high, low = two_sum(high, low + last)
        if self.mirrored:
            y = y * signs[:size, None]
            high, low = high * signs[count], low * signs[count]
        return y, (high, low)


@functools.lru_cache(maxsize=64)
def _sections(sos: bytes) -> list[_Section]:
    return [_Section.of(row) for row in np.frombuffer(sos).reshape(-1, 6)]


def _split_state(zi: mx.array, sections: list[_Section]) -> list[Pair]:
    """From scipy's state (section, 4, channel), pairs, to that of each section, pairs of (2, 1, channel)."""
    states = []
    for section, (high0, high1, low0, low1) in zip(sections, zi[:, :, None], strict=True):
        if section.mirrored:
            high1, low1 = -high1, -low1
        total, rest = two_sum(high0, high1)
        total, rest = two_sum(total, rest + (low0 + low1))
        states.append((mx.stack([high0, total]), mx.stack([low0, rest])))
    return states


def _join_state(states: list[Pair], sections: list[_Section]) -> mx.array:
    """The inverse of :func:`_split_state`."""
    joined = []
    for section, ((high0, total), (low0, rest)) in zip(sections, states, strict=True):
        high1, low1 = two_sum(total, -high0)
        high1, low1 = two_sum(high1, low1 + (rest - low0))
        if section.mirrored:
            high1, low1 = -high1, -low1
        joined.append(mx.concatenate([high0, high1, low0, low1]))
    return mx.stack(joined)


def compile_ahead(coefficients: npt.NDArray[np.float64], n_channels: int) -> None:
    """See :class:`~ezmsg.mlx.kernels.contract.Kernel`. MLX has its own operations compiled already."""


def run(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :meth:`ezmsg.mlx.kernels.contract.Kernel.run`. Lazy."""
    sections = _sections(sos.tobytes())

    def launch(chunk: mx.array, states: list[Pair], size: int, valid_length: mx.array) -> tuple[mx.array, list[Pair]]:
        # Samples that are not finite leave the stream of their channel, and those after them move up.
        taken = (mx.abs(chunk) <= LARGEST_SAMPLE) & (mx.arange(size, dtype=mx.uint32)[:, None] < valid_length)
        count = mx.cumsum(taken.astype(mx.int32), axis=0)
        y = mx.zeros((size + 1, chunk.shape[1]))
        y = mx.put_along_axis(y, mx.where(taken, count - 1, size), chunk, axis=0)[:size]
        after = []
        for section, start in zip(sections, states, strict=True):
            y, state = section.run(y, start, count[-1:])
            after.append(state)
        return mx.where(taken, mx.take_along_axis(y, mx.maximum(count - 1, 0), axis=0), chunk), after

    flat, flat_zi = time_first(x, axis), time_first(zi, axis + 1, lead=1)
    y, states = chunked_scan(flat, x.shape[axis], chunk_sizes, _split_state(flat_zi, sections), launch, axis=0)
    return time_back(y, x.shape, axis), time_back(_join_state(states, sections), zi.shape, axis + 1, lead=1)


def proofs() -> list[Proof[npt.NDArray[np.float64]]]:
    """See :class:`~ezmsg.mlx.kernels.contract.PlainKernel`: a section with poles near -1, and one with poles near 1."""
    sections = np.array([[0.3, 0.6, 0.3, 1.0, 0.4, 0.2], [1.0, -2.0, 1.0, 1.0, -1.9, 0.91]])
    return [Proof(sections, (len(sections), 4), filtered)]


def filtered(x: npt.NDArray[np.float64], sos: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Second-order sections as scipy's ``sosfilt``, sample by sample; one that is not finite leaves the state."""
    y, z = x.copy(), np.zeros((len(sos), 2, x.shape[1]))
    for sample, result in zip(x, y, strict=True):
        taken = np.isfinite(sample)
        for (b0, b1, b2, _, a1, a2), state in zip(sos, z, strict=True):
            value = b0 * result[taken] + state[0, taken]
            state[0, taken] = b1 * result[taken] - a1 * value + state[1, taken]
            state[1, taken] = b2 * result[taken] - a2 * value
            result[taken] = value
    return y
