"""How the kernels for CUDA link the tiles of a long message in one launch: decoupled look-back.

Each block takes a tile of samples and 32 channels, computes what the tile makes of a state of zero, and tells it at
once. Then it looks back for the nearest tile of which the state after it is known, goes forward from there over what
the tiles between have told, and tells the state after its own. So each sample is read and written once. Blocks start
in the order of their index, so that the tiles that one waits for are running.

D. Merrill, M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002.
"""

from __future__ import annotations

import functools
import itertools

import mlx.core as mx
import numpy as np

LANES = 32
"""Channels of a block for a long message: the threads of a warp."""

PLACE = r"""
  size_t n = x_shape[0];
  size_t n_channels = x_shape[1];
  size_t n_groups = (n_channels + LANES - 1) / LANES;
  size_t tile = blockIdx.x / n_groups;
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = blockIdx.x % n_groups * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  size_t first = tile * TILE + thread * SAMPLES;
"""
"""What a thread works on: the samples from number ``first`` on of ``channel``. Beyond the last channel it repeats that
one and writes nothing."""

LOOK_BACK = r"""
namespace {

// What a tile has told: what it makes of a state of zero, or the state after it. Above these two bits of a tag is the
// number of samples that the state goes over.
constexpr unsigned ALONE = 1;
constexpr unsigned AFTER = 2;

// A float64 travels as two words, each a float32 and the tag, so that no other block ever takes a half of it for all.
__device__ double as_it_travels(double value) {
  float high = float(value);
  return double(high) + double(float(value - double(high)));
}

template <int SIZE>
__device__ void tell(const int64_t* told, size_t at, size_t n_channels, const double* values, unsigned tag) {
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    float high = float(values[i]);
    float halves[] = {high, float(values[i] - double(high))};
    #pragma unroll
    for (int k = 0; k < 2; ++k) {
      auto word = reinterpret_cast<volatile unsigned long long*>(const_cast<int64_t*>(told));
      word[at + (2 * i + k) * n_channels] = (unsigned long long)(tag) << 32 | __float_as_uint(halves[k]);
    }
  }
}

// Waits until something was told, and returns its tag.
template <int SIZE>
__device__ unsigned hear(const int64_t* told, size_t at, size_t n_channels, double* values) {
  auto word = reinterpret_cast<const volatile unsigned long long*>(told) + at;
  while (true) {
    unsigned tags = 0;
    bool is_whole = true;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      unsigned long long high = word[2 * i * n_channels];
      unsigned long long low = word[(2 * i + 1) * n_channels];
      if (i == 0) tags = unsigned(high >> 32);
      is_whole = is_whole && unsigned(high >> 32) == tags && unsigned(low >> 32) == tags;
      values[i] = double(__uint_as_float(unsigned(high))) + double(__uint_as_float(unsigned(low)));
    }
    if (is_whole && tags) return tags;
  }
}

// Gives *start*, the state before the tile, and to the first thread of each channel *after*, the state after it. That
// thread brings *alone*, what the *taken* samples of the tile make of a state of zero; *before* is the state before the
// message, *go_on(taken, alone, state)* what becomes of a state over a tile.
template <int SIZE, int THREADS, typename GoOn>
__device__ void link(
    const int64_t* told, size_t tile, size_t channel, size_t n_channels, int taken, const double* alone,
    const double (*before)[32], double (*start)[32], double (*after)[32], GoOn go_on) {
  // The first row is of the tile itself, the next of the one before it, and so on.
  __shared__ double heard[THREADS + 1][SIZE][32];
  __shared__ unsigned tags[THREADS + 1][32];
  __shared__ bool is_known;
  size_t of_tile = 2 * SIZE * n_channels;
  unsigned thread = threadIdx.y;
  unsigned lane = threadIdx.x;
  if (thread == 0) {
    tags[0][lane] = unsigned(taken) << 2 | ALONE;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) heard[0][i][lane] = as_it_travels(alone[i]);
    if (tile) tell<SIZE>(told, tile * of_tile + channel, n_channels, alone, tags[0][lane]);
  }
  do {
    double values[SIZE];
    unsigned tag = AFTER;
    if (thread < tile) {
      tag = hear<SIZE>(told, (tile - 1 - thread) * of_tile + channel, n_channels, values);
    } else {
      #pragma unroll
      for (int i = 0; i < SIZE; ++i) values[i] = before[i][lane];
    }
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) heard[thread + 1][i][lane] = values[i];
    tags[thread + 1][lane] = tag;
    __syncthreads();
    if (thread == 0) {
      int other = 1;
      while (other <= THREADS && (tags[other][lane] & 3) != AFTER) ++other;
      bool of_all = __all_sync(~0u, other <= THREADS);
      if (lane == 0) is_known = of_all;
      if (of_all) {
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) values[i] = heard[other][i][lane];
        #pragma unroll 1
        while (other-- > 0) {
          if (other == 0) {
            #pragma unroll
            for (int i = 0; i < SIZE; ++i) start[i][lane] = values[i];
          }
          double of_other[SIZE];
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) of_other[i] = heard[other][i][lane];
          go_on(tags[other][lane] >> 2, of_other, values);
          // So that the result does not depend on which tiles were quick.
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) values[i] = as_it_travels(values[i]);
        }
        tell<SIZE>(told, tile * of_tile + channel, n_channels, values, AFTER);
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) after[i][lane] = values[i];
      }
    }
    __syncthreads();
  } while (!is_known);
}

}  // namespace
"""


def blocks(n_tiles: int, n_threads: int, n_channels: int) -> dict[str, tuple[int, int, int]]:
    """The blocks for a message, each with *n_threads* along time, in the words of ``mlx.core.fast.cuda_kernel``.

    All along x, tile after tile, since that is the order in which they start.
    """
    n_blocks = n_tiles * -(-n_channels // LANES)
    return {"grid": (n_blocks * LANES, n_threads, 1), "threadgroup": (LANES, n_threads, 1)}


_calls = itertools.count(1)


@functools.cache
def _zero() -> mx.array:
    return mx.array(np.zeros(1, np.int64))


def nothing_told(n_tiles: int, n_states: int, n_channels: int) -> mx.array:
    """Room for what each tile tells of its *n_states* states of each channel, with nothing told.

    Zeros, in memory of its own, since the kernel writes to it. So no two calls may come out as the same expression,
    of which `mx.compile` would make one array; and `mx.zeros` would upload a scalar with each message.
    """
    call = next(_calls)
    return mx.broadcast_to(_zero(), (n_tiles, 2 * n_states, n_channels)) * mx.arange(call, call + 1, dtype=mx.int64)
