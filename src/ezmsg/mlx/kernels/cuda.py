"""Kernels for CUDA, through ``mx.fast.cuda_kernel``: data time first, blocks along time and channels.

A block takes a tile of samples and up to 32 channels. Each thread keeps ``SAMPLES`` consecutive samples of one
channel in registers, runs the recurrence over them from a zero state, and learns from the threads before it what
the true state was. A message of one tile is one launch that reads and writes each sample once. A longer one takes
three: the tiles' effects alone, their scan, and the result; 1.5 times the traffic of a copy.

Computed on the deviation from the average before the message, in float32; the state, and what links the tiles, in
float64 (a few operations a tile and channel).
"""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import numpy as np

from ..scan import chunked_scan

SAMPLES = 16
"""Samples that one thread keeps in registers."""

LONE_TILE = 32 * SAMPLES
"""Samples of the largest message that one block takes along time: 32 threads."""

TILE = 16 * SAMPLES
"""Samples of a tile of a longer message: half the threads, so that an SM holds blocks that wait and that work."""

_COMMON = r"""
namespace {

// Samples past the end count as not finite: like those, they leave the state alone.
template <int SAMPLES>
__device__ void load(const float* x, size_t first, size_t n, size_t channel, size_t n_channels, float* samples) {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    samples[i] = first + i < n ? x[(first + i) * n_channels + channel] : __int_as_float(0x7fffffff);
  }
}

struct Average {
  double value;
  float high;
  float low;
};

// From scipy's state (1 - alpha) * y[-1], held as a float32 and what that rounding lost.
__device__ Average average_before(const float* zi, size_t channel, size_t n_channels, double alpha) {
  double state = double(zi[channel]) + double(zi[n_channels + channel]);
  double value = alpha < 1.0 ? state / (1.0 - alpha) : 0.0;
  float high = float(value);
  return {value, high, float(value - double(high))};
}

}  // namespace
"""

_LOCAL = r"""
  // This thread's samples alone: the average moves from 0 to `moved`, and what was there before decays by `decay`.
  float alpha_f = coefficients[0];
  float moved = 0.0f;
  int n_finite = 0;
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i] - before.high) - before.low;
    if (isfinite(samples[i])) {
      moved = fmaf(alpha_f, deviation - moved, moved);
      ++n_finite;
    }
  }
"""

_PLACE = r"""
  size_t n = x_shape[0];
  size_t n_channels = x_shape[1];
  size_t tile = blockIdx.x;
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = size_t(blockIdx.y) * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  double alpha = double(coefficients[0]) + double(coefficients[1]);

  float samples[SAMPLES];
  load<SAMPLES>(x, (tile * THREADS + thread) * SAMPLES, n, channel, n_channels, samples);
  Average before = average_before(zi, channel, n_channels, alpha);
"""

_TILES = (
    _PLACE
    + _LOCAL
    + r"""
  __shared__ float all_moved[THREADS][LANES];
  __shared__ int all_finite[THREADS][LANES];
  all_moved[thread][lane] = moved;
  all_finite[thread][lane] = n_finite;
  __syncthreads();
  if (thread == 0 && active) {
    float total = 0.0f;
    int finite = 0;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(coefficients[4 + all_finite[i][lane]], total, all_moved[i][lane]);
      finite += all_finite[i][lane];
    }
    tile_moved[tile * n_channels + channel] = total;
    tile_finite[tile * n_channels + channel] = finite;
  }
"""
)

_LINK = r"""
  size_t n_tiles = tile_moved_shape[0];
  size_t n_channels = tile_moved_shape[1];
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = size_t(blockIdx.y) * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  double beta = 1.0 - (double(coefficients[0]) + double(coefficients[1]));
  double beta_tile = double(coefficients[2]) + double(coefficients[3]);
  size_t share = (n_tiles + THREADS - 1) / THREADS;
  size_t first = thread * share < n_tiles ? thread * share : n_tiles;
  size_t last = first + share < n_tiles ? first + share : n_tiles;

  double moved = 0.0;
  double decay = 1.0;
  #pragma unroll 8
  for (size_t tile = first; tile < last; ++tile) {
    int finite = tile_finite[tile * n_channels + channel];
    double by_tile = finite == TILE ? beta_tile : pow(beta, double(finite));
    moved = fma(by_tile, moved, double(tile_moved[tile * n_channels + channel]));
    decay *= by_tile;
  }
  __shared__ double all_moved[THREADS][LANES];
  __shared__ double all_decay[THREADS][LANES];
  all_moved[thread][lane] = moved;
  all_decay[thread][lane] = decay;
  __syncthreads();
  moved = 0.0;
  for (int i = 0; i < thread; ++i) {
    moved = fma(all_decay[i][lane], moved, all_moved[i][lane]);
  }
  if (!active) return;
  #pragma unroll 8
  for (size_t tile = first; tile < last; ++tile) {
    tile_start[tile * n_channels + channel] = float(moved);
    int finite = tile_finite[tile * n_channels + channel];
    double by_tile = finite == TILE ? beta_tile : pow(beta, double(finite));
    moved = fma(by_tile, moved, double(tile_moved[tile * n_channels + channel]));
  }
"""

_RESULT = (
    _PLACE
    + _LOCAL
    + r"""
  __shared__ float all_moved[THREADS][LANES];
  __shared__ float all_decay[THREADS][LANES];
  all_moved[thread][lane] = moved;
  all_decay[thread][lane] = coefficients[4 + n_finite];
  __syncthreads();
  moved = LONE ? 0.0f : tile_start[tile * n_channels + channel];
  #pragma unroll
  for (int i = 0; i < THREADS - 1; ++i) {
    if (i < thread) moved = fmaf(all_decay[i][lane], moved, all_moved[i][lane]);
  }
  if (!active) return;

  size_t first = (tile * THREADS + thread) * SAMPLES;
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i] - before.high) - before.low;
    float result = samples[i];
    if (isfinite(samples[i])) {
      moved = fmaf(alpha_f, deviation - moved, moved);
      result = before.high + (before.low + moved);
    }
    if (first + i < n) y[(first + i) * n_channels + channel] = result;
  }
  if (thread == THREADS - 1 && tile == (n - 1) / (THREADS * SAMPLES)) {
    double state = (1.0 - alpha) * (before.value + double(moved));
    float high = float(state);
    zf[channel] = high;
    zf[n_channels + channel] = float(state - double(high));
  }
"""
)


@functools.cache
def _kernel(name: str):  # noqa: ANN202 - an opaque callable of MLX
    inputs, outputs, source = {
        "tiles": (["x", "zi", "coefficients"], ["tile_moved", "tile_finite"], _TILES),
        "link": (["tile_moved", "tile_finite", "coefficients"], ["tile_start"], _LINK),
        "result": (["x", "zi", "coefficients", "tile_start"], ["y", "zf"], _RESULT),
    }[name]
    return mx.fast.cuda_kernel(
        name=f"ezmsg_mlx_ewma_{name}", input_names=inputs, output_names=outputs, header=_COMMON, source=source
    )


@functools.lru_cache(maxsize=64)
def _coefficients(alpha: float) -> mx.array:
    """*alpha* and ``beta ** TILE`` as float32 pairs, then ``beta ** k`` for k samples of a thread; uploaded once."""

    def pair(value: float) -> list[float]:
        high = float(np.float32(value))
        return [high, value - high]

    def power(exponent: int) -> float:
        if exponent == 0:
            return 1.0
        return math.exp(exponent * math.log1p(-alpha)) if alpha < 1.0 else 0.0

    table = [*pair(alpha), *pair(power(TILE)), *(power(k) for k in range(SAMPLES + 1))]
    return mx.array(np.array(table, np.float32))


def grid_size(n_samples: int) -> int:
    """The length in samples of the buffer for *n_samples*: eight lengths an octave, the next that holds them.

    Not exact lengths, so that rare messages share few size classes; at most an eighth is left unused, and
    unwritten.
    """
    if n_samples <= 8:
        return max(n_samples, 1)
    step = 1 << (n_samples - 1).bit_length() - 4
    return -(-n_samples // step) * step


def ewma(x: mx.array, alpha: float, zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.ewma.ewma`. Lazy. Nothing is compiled for a size, so *chunk_sizes* do not matter here."""
    coefficients = _coefficients(alpha)

    def launch(chunk: mx.array, state: mx.array, size: int, valid_length: mx.array) -> tuple[mx.array, mx.array]:
        n_samples, n_channels = chunk.shape
        lanes = min(32, 1 << (n_channels - 1).bit_length())
        groups = -(-n_channels // lanes)
        lone = n_samples <= LONE_TILE
        threads = (LONE_TILE if lone else TILE) // SAMPLES
        tiles = -(-n_samples // (threads * SAMPLES))
        template = [("SAMPLES", SAMPLES), ("LANES", lanes), ("THREADS", threads)]
        launched = {"grid": (lanes * tiles, threads * groups, 1), "threadgroup": (lanes, threads, 1)}
        start = coefficients
        if not lone:
            moved, finite = _kernel("tiles")(
                inputs=[chunk, state, coefficients],
                template=template,
                output_shapes=[(tiles, n_channels)] * 2,
                output_dtypes=[mx.float32, mx.int32],
                **launched,
            )
            (start,) = _kernel("link")(
                inputs=[moved, finite, coefficients],
                template=[("TILE", TILE), ("LANES", lanes), ("THREADS", 32)],
                grid=(lanes, 32 * groups, 1),
                threadgroup=(lanes, 32, 1),
                output_shapes=[(tiles, n_channels)],
                output_dtypes=[mx.float32],
            )
        y, after = _kernel("result")(
            inputs=[chunk, state, coefficients, start],
            template=[*template, ("LONE", lone)],
            output_shapes=[(size, n_channels), (2, n_channels)],
            output_dtypes=[mx.float32, mx.float32],
            **launched,
        )
        return y, after

    n_samples = x.shape[axis]
    if axis == 0 and x.ndim == 2:
        return chunked_scan(x, n_samples, (grid_size(n_samples),), zi, launch, axis=0, pad=False)
    moved = mx.moveaxis(x, axis, 0)
    flat = moved.reshape(n_samples, -1)
    flat_state = mx.moveaxis(zi, axis, 0).reshape(2, -1)
    y, zf = chunked_scan(flat, n_samples, (grid_size(n_samples),), flat_state, launch, axis=0, pad=False)
    others = moved.shape[1:]
    return mx.moveaxis(y.reshape(n_samples, *others), 0, axis), mx.moveaxis(zf.reshape(2, *others), 0, axis)
