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

LONE_SAMPLES = 32
"""The same where a message is one tile."""

LONE_TILE = 16 * LONE_SAMPLES
"""Samples of the largest message that one block takes along time."""

TILE = 8 * SAMPLES
"""Samples of a tile of a longer message: fewer threads, so that an SM holds blocks that wait and blocks that work."""

_COMMON = r"""
namespace {

// Beyond this a deviation is taken for one that is not finite, before sums of its kind overflow.
constexpr float LARGEST = 3.4e38f;

// Samples past the end count as not finite: like those, they leave the state alone.
template <int SAMPLES>
__device__ void load(const float* x, size_t first, size_t n, size_t channel, size_t n_channels, float* samples) {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    samples[i] = first + i < n ? x[(first + i) * n_channels + channel] : __int_as_float(0x7fffffff);
  }
}

// The average that deviations are taken from, and the state (1 - alpha) * (y[-1] - average) that remains.
struct Before {
  double average;
  float high;
  float low;
  double state;
};

// From scipy's state (1 - alpha) * y[-1], held as a float32 and what that rounding lost. A short memory gains
// nothing from deviations, and would divide a state that need not be its own by next to nothing.
__device__ Before state_before(const float* zi, size_t channel, size_t n_channels, double alpha) {
  double state = double(zi[channel]) + double(zi[n_channels + channel]);
  if (alpha > 0.5) return {0.0, 0.0f, 0.0f, state};
  double average = state / (1.0 - alpha);
  float high = float(average);
  return {average, high, float(average - double(high)), 0.0};
}

}  // namespace
"""

_LOCAL = r"""
  // What this thread's samples alone make of a state of zero; one that was there decays with each finite sample.
  float alpha_f = coefficients[0];
  float beta_f = coefficients[5];
  float state = 0.0f;
  int n_finite = 0;
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i] - before.high) - before.low;
    if (fabsf(deviation) < LARGEST) {
      state = beta_f * fmaf(alpha_f, deviation, state);
      ++n_finite;
    }
  }
"""

_PLACE = r"""
  size_t n = x_shape[0];
  size_t n_channels = x_shape[1];
  size_t tile = LAST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = size_t(blockIdx.y) * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  double alpha = double(coefficients[0]) + double(coefficients[1]);

  float samples[SAMPLES];
  load<SAMPLES>(x, (tile * THREADS + thread) * SAMPLES, n, channel, n_channels, samples);
  Before before = state_before(zi, channel, n_channels, alpha);
"""

_TILES = (
    _PLACE
    + _LOCAL
    + r"""
  __shared__ float all_states[THREADS][LANES];
  __shared__ int all_finite[THREADS][LANES];
  all_states[thread][lane] = state;
  all_finite[thread][lane] = n_finite;
  __syncthreads();
  if (thread == 0 && active) {
    float total = 0.0f;
    int finite = 0;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(coefficients[4 + all_finite[i][lane]], total, all_states[i][lane]);
      finite += all_finite[i][lane];
    }
    tile_state[tile * n_channels + channel] = total;
    tile_finite[tile * n_channels + channel] = finite;
  }
"""
)

_LINK = r"""
  size_t n_tiles = tile_state_shape[0];
  size_t n_channels = tile_state_shape[1];
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = size_t(blockIdx.y) * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  double alpha = double(coefficients[0]) + double(coefficients[1]);
  double beta_tile = double(coefficients[2]) + double(coefficients[3]);
  size_t share = (n_tiles + THREADS - 1) / THREADS;
  size_t first = thread * share < n_tiles ? thread * share : n_tiles;
  size_t last = first + share < n_tiles ? first + share : n_tiles;

  double state = 0.0;
  double decay = 1.0;
  #pragma unroll 8
  for (size_t tile = first; tile < last; ++tile) {
    int finite = tile_finite[tile * n_channels + channel];
    double by_tile = finite == TILE ? beta_tile : pow(1.0 - alpha, double(finite));
    state = fma(by_tile, state, double(tile_state[tile * n_channels + channel]));
    decay *= by_tile;
  }
  __shared__ double all_states[THREADS][LANES];
  __shared__ double all_decays[THREADS][LANES];
  all_states[thread][lane] = state;
  all_decays[thread][lane] = decay;
  __syncthreads();
  state = state_before(zi, channel, n_channels, alpha).state;
  for (int i = 0; i < thread; ++i) {
    state = fma(all_decays[i][lane], state, all_states[i][lane]);
  }
  if (!active) return;
  #pragma unroll 8
  for (size_t tile = first; tile < last; ++tile) {
    tile_start[tile * n_channels + channel] = float(state);
    int finite = tile_finite[tile * n_channels + channel];
    double by_tile = finite == TILE ? beta_tile : pow(1.0 - alpha, double(finite));
    state = fma(by_tile, state, double(tile_state[tile * n_channels + channel]));
  }
"""

_RESULT = (
    _PLACE
    + _LOCAL
    + r"""
  __shared__ float all_states[THREADS][LANES];
  __shared__ float all_decays[THREADS][LANES];
  all_states[thread][lane] = state;
  all_decays[thread][lane] = coefficients[4 + n_finite];
  __syncthreads();
  state = LONE ? float(before.state) : tile_start[tile * n_channels + channel];
  #pragma unroll
  for (int i = 0; i < THREADS - 1; ++i) {
    if (i < thread) state = fmaf(all_decays[i][lane], state, all_states[i][lane]);
  }
  if (!active) return;

  size_t first = (tile * THREADS + thread) * SAMPLES;
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i] - before.high) - before.low;
    float result = samples[i];
    if (fabsf(deviation) < LARGEST) {
      float moved = fmaf(alpha_f, deviation, state);
      state = beta_f * moved;
      result = before.high + (before.low + moved);
    }
    if (first + i < n) y[(first + i) * n_channels + channel] = result;
  }
  if (thread == THREADS - 1 && tile == (n - 1) / (THREADS * SAMPLES)) {
    double after = (1.0 - alpha) * before.average + double(state);
    float high = float(after);
    zf[channel] = high;
    zf[n_channels + channel] = float(after - double(high));
  }
"""
)


@functools.cache
def _kernel(name: str, lanes: int, samples: int, threads: int, lone: bool):  # noqa: ANN202 - an opaque callable of MLX
    inputs, outputs, source = {
        "tiles": (["x", "zi", "coefficients"], ["tile_state", "tile_finite"], _TILES),
        "link": (["tile_state", "tile_finite", "zi", "coefficients"], ["tile_start"], _LINK),
        "result": (["x", "zi", "coefficients", "tile_start"], ["y", "zf"], _RESULT),
    }[name]
    # Constants in the source and not as template arguments, which MLX takes apart at each call.
    constants = {"SAMPLES": samples, "TILE": TILE, "LANES": lanes, "THREADS": threads, "LONE": int(lone)}
    # The last samples that the first launch read are those that may still be in the second-level cache.
    constants["LAST_FIRST"] = int(name == "result" and not lone)
    return mx.fast.cuda_kernel(
        name=f"ezmsg_mlx_ewma_{name}_" + "_".join(map(str, constants.values())),
        input_names=inputs,
        output_names=outputs,
        header=_COMMON,
        source="".join(f"constexpr int {key} = {value};\n" for key, value in constants.items()) + source,
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

    table = [*pair(alpha), *pair(power(TILE)), *(power(k) for k in range(max(SAMPLES, LONE_SAMPLES) + 1))]
    return mx.array(np.array(table, np.float32))


def grid_size(n_samples: int) -> int:
    """The length in samples of the buffer for *n_samples*: eight lengths an octave, the next that holds them.

    Not exact lengths, so that rare messages share few size classes; at most an eighth is left unused, and
    unwritten. The few short lengths are exact, which saves the short, steady message the cut.
    """
    if n_samples <= LONE_TILE:
        return n_samples
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
        samples = LONE_SAMPLES if lone else SAMPLES
        threads = (LONE_TILE if lone else TILE) // samples
        tiles = -(-n_samples // (threads * samples))
        blocks = {"grid": (lanes * tiles, threads * groups, 1), "threadgroup": (lanes, threads, 1)}
        start = coefficients
        if not lone:
            tile_state, tile_finite = _kernel("tiles", lanes, samples, threads, lone)(
                inputs=[chunk, state, coefficients],
                output_shapes=[(tiles, n_channels)] * 2,
                output_dtypes=[mx.float32, mx.int32],
                **blocks,
            )
            (start,) = _kernel("link", lanes, samples, 32, lone)(
                inputs=[tile_state, tile_finite, state, coefficients],
                output_shapes=[(tiles, n_channels)],
                output_dtypes=[mx.float32],
                grid=(lanes, 32 * groups, 1),
                threadgroup=(lanes, 32, 1),
            )
        return tuple(
            _kernel("result", lanes, samples, threads, lone)(
                inputs=[chunk, state, coefficients, start],
                output_shapes=[(size, n_channels), (2, n_channels)],
                output_dtypes=[mx.float32, mx.float32],
                **blocks,
            )
        )

    n_samples = x.shape[axis]
    if axis == 0 and x.ndim == 2:
        return chunked_scan(x, n_samples, (grid_size(n_samples),), zi, launch, axis=0, pad=False)
    moved = mx.moveaxis(x, axis, 0)
    flat = moved.reshape(n_samples, -1)
    flat_state = mx.moveaxis(zi, axis, 0).reshape(2, -1)
    y, zf = chunked_scan(flat, n_samples, (grid_size(n_samples),), flat_state, launch, axis=0, pad=False)
    others = moved.shape[1:]
    return mx.moveaxis(y.reshape(n_samples, *others), 0, axis), mx.moveaxis(zf.reshape(2, *others), 0, axis)
