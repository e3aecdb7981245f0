"""Filters without feedback: sums of the last samples, each times a number (a tap).

On the CPU a loop over a view of MLX's memory computes them, and for many taps scipy's FFT; on a GPU MLX's FFT, since
its convolutions and products of matrices compute in TF32 there. The FFT goes over blocks of one length for each filter,
of which 1, 2, 4, 8 and so on are taken at a time: however long the messages are, MLX keeps plans for a few shapes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..stream.device import uses_gpu

if TYPE_CHECKING:
    import mlx.core as mx

SMALLEST_BLOCK = 256
"""Least length of an FFT."""

VALUES_AT_A_TIME = 1 << 23
"""Values that the blocks of one step have in all filters: 32 MiB of float32."""

DIRECT_COST, FFT_COST, SHARED_FFT_COST = 0.19, 7.5, 10.5
"""Costs on the CPU of a tap of a sample, a value of a block for each filter, and one for all of them together, in
nanoseconds."""


class FilterBank:
    """Several filters without feedback, of the same samples.

    Args:
        kernels: The taps of each, real or complex, of any lengths.
    """

    def __init__(self, kernels: Sequence[npt.NDArray]) -> None:
        n_taps = max(len(kernel) for kernel in kernels)
        taps = np.stack([np.pad(np.asarray(kernel), (0, n_taps - len(kernel))) for kernel in kernels])
        self.n_before = n_taps - 1
        """Samples of before that the first result needs."""
        self.is_complex = taps.dtype.kind == "c"
        """Whether results are complex."""
        self._n_kernels = len(taps)
        if self.is_complex:
            taps = np.concatenate([taps.real, taps.imag])
        self._taps = np.ascontiguousarray(taps, np.float64)
        self._sums = self._taps.sum(axis=1)
        self._blocks = [max(SMALLEST_BLOCK, 1 << (share * n_taps - 1).bit_length()) for share in (2, 4)]
        self._spectra: dict[tuple[int, bool], Any] = {}

    def before(self, x: mx.array, axis: int) -> mx.array:
        """Zeros in place of the samples before *x*."""
        import mlx.core as mx

        return mx.zeros((*x.shape[:axis], self.n_before, *x.shape[axis + 1 :]), x.dtype)

    def run(self, x: mx.array, before: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        """The results of all filters.

        Args:
            x: Samples, float32 or complex64, one or more along *axis*.
            before: Those before it, :attr:`n_before` along *axis*; of the dtype of *x*.
            axis: Of the samples.

        Returns:
            The results, the shape of *x* without *axis*, with the filters and the samples as the last two; float32, or
            complex64 where *x* or a filter is complex. And the samples before the next ones, as *before*.
        """
        import mlx.core as mx

        if x.dtype == mx.complex64:
            (real, before_real), (imag, before_imag) = (
                self.run(part(x), part(before), axis) for part in (mx.real, mx.imag)
            )
            return real + 1j * imag, before_real + 1j * before_imag
        if uses_gpu():
            y, after = self._on_gpu(x, before, axis)
            others = x.shape[:axis] + x.shape[axis + 1 :]
            y = mx.moveaxis(y.reshape(len(self._taps), *others, -1), 0, -2)
            if self.is_complex:
                y = y[..., : self._n_kernels, :] + 1j * y[..., self._n_kernels :, :]
            return y, after
        rows, last, others = _rows(x, before, axis, self.n_before)
        found = self._on_host(rows)
        result = np.empty(
            (rows.shape[1], self._n_kernels, found.shape[1]), np.complex64 if self.is_complex else np.float32
        )
        if self.is_complex:
            result.real = found[: self._n_kernels].transpose(2, 0, 1)
            result.imag = found[self._n_kernels :].transpose(2, 0, 1)
        else:
            result[:] = found.transpose(2, 0, 1)
        return mx.array(result.reshape(*others, *result.shape[1:])), last

    def run_one(self, x: mx.array, before: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        """The same for a bank of one real filter: the results of float32 *x* have its shape."""
        import mlx.core as mx

        if uses_gpu():
            y, after = self._on_gpu(x, before, axis)
            others = x.shape[:axis] + x.shape[axis + 1 :]
            return mx.moveaxis(y.reshape(*others, -1), -1, axis), after
        rows, last, others = _rows(x, before, axis, self.n_before)
        found = self._on_host(rows)[0].reshape(-1, *others)
        return mx.array(np.ascontiguousarray(np.moveaxis(found, 0, axis)) if axis else found), last

    def _on_host(self, rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The results, (n_filters, n_samples, n_channels), of *rows* with the samples of before."""
        n_samples = len(rows) - self.n_before
        block = self._block_for(n_samples)
        n_values = -(-n_samples // (block - self.n_before)) * block
        by_fft = n_values * (FFT_COST * len(self._taps) + SHARED_FFT_COST)
        if n_samples * self._taps.size * DIRECT_COST <= by_fft:
            from .cpu.convolution import filter_rows

            y = np.empty((len(self._taps), n_samples, rows.shape[1]), np.float32)
            filter_rows(rows, self._taps, y)
            return y
        import scipy.fft

        y = self._by_fft(np.ascontiguousarray(rows.T), np, scipy.fft)
        return np.ascontiguousarray(y.transpose(0, 2, 1))

    def _on_gpu(self, x: mx.array, before: mx.array, axis: int) -> tuple[mx.array, mx.array]:
        """The results, (n_filters, n_channels, n_samples), and the samples of before the next ones."""
        import mlx.core as mx

        joined = mx.concatenate([before, x], axis=axis)
        after = joined[(slice(None),) * axis + (slice(x.shape[axis], None),)]
        # Otherwise it would hold the graph of this message until its results are read.
        mx.async_eval(after)
        last = mx.moveaxis(joined, axis, -1)
        return self._by_fft(last.reshape(-1, last.shape[-1]), mx, mx.fft), after

    def _block_for(self, n_samples: int) -> int:
        """The length of an FFT: a short one where one is enough for all samples."""
        short, long = self._blocks
        return short if n_samples <= short - self.n_before else long

    def _spectra_of(self, block: int, xp: Any) -> Any:
        key = block, xp is np
        if key not in self._spectra:
            self._spectra[key] = xp.array(np.fft.rfft(self._taps, block).astype(np.complex64))
        return self._spectra[key]

    def _by_fft(self, x: Any, xp: Any, fft: Any) -> Any:
        """As :meth:`_on_gpu`, of *x* (n_channels, n_before + n_samples), in the array library *xp*."""
        n_before = self.n_before
        n_samples = x.shape[-1] - n_before
        block = self._block_for(n_samples)
        step, spectra = block - n_before, self._spectra_of(block, xp)
        is_lost = ~xp.isfinite(x)
        # On a GPU the host does not wait for the answer.
        is_clean = xp is np and not is_lost.any()
        finite = x if is_clean else xp.where(is_lost, 0.0, x)
        # What an FFT rounds belongs to the largest value, which may be an offset that the filter takes away.
        mean = finite.mean(axis=-1, keepdims=True)
        centred = x - mean if is_clean else xp.where(is_lost, 0.0, finite - mean)
        n_blocks = -(-n_samples // step)
        centred = xp.pad(centred, [(0, 0), (0, n_blocks * step + n_before - x.shape[-1])])
        most = max(VALUES_AT_A_TIME // (len(x) * len(self._taps) * block), 1)
        parts, start = [], 0
        while start < n_blocks:
            n = 1 << (min(n_blocks - start, most).bit_length() - 1)
            starts = range(start * step, (start + n) * step, step)
            blocks = xp.stack([centred[:, i : i + block] for i in starts], axis=1)
            spectrum = fft.rfft(blocks, axis=-1) * spectra[:, None, None, :]
            y = fft.irfft(spectrum, n=block, axis=-1)[..., n_before:]
            parts.append(y.reshape(len(self._taps), len(x), n * step))
            start += n
            if xp is not np and start < n_blocks:
                # The blocks of the next step then need not wait for all of these to be asked for.
                xp.async_eval(parts[-1])
        y = (parts[0] if len(parts) == 1 else xp.concatenate(parts, axis=-1))[..., :n_samples]
        y = y + xp.array(self._sums.astype(np.float32))[:, None, None] * mean
        if is_clean:
            return y
        # Where a sample that is not finite takes part there is no result.
        lost = xp.cumsum(xp.pad(is_lost.astype(xp.int32), [(0, 0), (1, 0)]), axis=-1)
        takes_part = lost[:, n_before + 1 :] > lost[:, :n_samples]
        return xp.where(takes_part, math.nan, y).astype(xp.float32)


def _rows(
    x: mx.array, before: mx.array, axis: int, n_before: int
) -> tuple[npt.NDArray[np.float32], mx.array, tuple[int, ...]]:
    """All samples as (n_before + n_samples, n_channels), those before the next ones, and the shape of the channels."""
    import mlx.core as mx

    given = [np.moveaxis(np.asarray(part), axis, 0) for part in (before, x)]
    others = given[1].shape[1:]
    rows = np.concatenate([part.reshape(len(part), math.prod(others)) for part in given])
    last = rows[len(rows) - n_before :].reshape(n_before, *others)
    return rows, mx.array(np.ascontiguousarray(np.moveaxis(last, 0, axis))), others
