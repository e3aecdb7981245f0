"""Second-order sections on CUDA, through ``mx.fast.cuda_kernel``: data time first, state and arithmetic in float64.

A short message is one launch: a thread keeps 16 consecutive samples of one channel in registers, runs a section over
them from a zero state, learns from the threads before it what the true state was, runs it again, and goes on to
the next section. A longer one takes three: each thread runs all sections over a tile of its own from a zero state,
then one thread a channel links the tiles, and each thread runs over its tile again from the true state. So the data
crosses memory 1.5 times as often as in a copy, for up to four sections; more of them take more passes.

float64, since scipy's state needs it where a pole is next to 1. A data-centre GPU has half as many float64 units as
float32 ones, which keeps pace with memory for two sections; other GPUs have 1/64: one second of 1024 channels at
30 kHz and two sections are 1.2e9 operations, a millisecond of a large one.
"""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from ..scan import chunked_scan
from .cuda import grid_size
from .layout import LARGEST_SAMPLE, time_back, time_first

SAMPLES = 8
"""Samples that one thread keeps in registers."""

LONE_SAMPLES = 16
"""The same in a message that takes one launch."""

LONE_TILE = 32 * LONE_SAMPLES
"""Samples of the largest such message."""

THREADS = 128
"""Threads of a block for a longer message: with the registers that a thread takes, five blocks fit in an SM."""

LONE_LANES = 8
"""Channels of a block in that launch; few, so that 256 channels are spread over 32 multiprocessors."""

MAX_SECTIONS = 4
"""Sections of a pass over a longer message: their transition over a tile fits in the registers of a thread."""

_ROW = 9
"""Values that the table of coefficients has for each section: five coefficients and a 2 x 2 transition."""

_COMMON = r"""
namespace {

// y = b0 * x + z0, then z0 = z1 - a1 * z0 + g0 * x and z1 = g1 * x - a2 * z0 of before: scipy's recurrence with y
// put in, in which one sample waits for 1.5 operations of the sample before it, and not for 2.
struct Section {
  double b0, g0, g1, a1, a2;
};

// MLX has no float64 on a GPU, so it travels in arrays of int64.
__device__ const double* doubles(const int64_t* values) { return reinterpret_cast<const double*>(values); }
__device__ double* doubles(int64_t* values) { return reinterpret_cast<double*>(values); }

__device__ Section section_at(const int64_t* table, int section) {
  const double* row = doubles(table) + section * ROW;
  return {row[0], row[1], row[2], row[3], row[4]};
}

// Bit i of the result is set where sample i is one to filter. Past the end it is the last sample that is loaded:
// a load that depends on a condition costs registers.
template <int SAMPLES>
__device__ unsigned load(const float* x, size_t first, size_t n, size_t n_channels, double* values) {
  unsigned taken = 0;
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    bool inside = first + i < n;
    float value = x[(inside ? first + i : n - 1) * n_channels];
    if (inside && fabsf(value) <= LARGEST_SAMPLE) taken |= 1u << i;
    values[i] = value;
  }
  return taken;
}

__device__ void step(const Section& c, double& value, double& z0, double& z1) {
  double y = fma(c.b0, value, z0);
  double next = fma(-c.a1, z0, fma(c.g0, value, z1));
  z1 = fma(-c.a2, z0, c.g1 * value);
  z0 = next;
  value = y;
}

template <int SAMPLES>
__device__ void run(const Section& c, unsigned taken, double* values, double& z0, double& z1) {
  if (taken == (1u << SAMPLES) - 1u) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) step(c, values[i], z0, z1);
  } else {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) {
      if (taken >> i & 1u) step(c, values[i], z0, z1);
    }
  }
}

// The samples that are not taken are in *values* as they were.
template <int SAMPLES>
__device__ void store(float* y, size_t first, size_t n, size_t n_channels, const double* values) {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    if (first + i < n) y[(first + i) * n_channels] = float(values[i]);
  }
}

// States come and go as pairs of float32, four values a section and channel.
__device__ double state_at(const float* zi, int i, size_t channel, size_t n_channels) {
  const float* of_section = zi + (4 * (i / 2) + i % 2) * n_channels + channel;
  return double(of_section[0]) + double(of_section[2 * n_channels]);
}

__device__ void set_state(float* zf, int i, size_t channel, size_t n_channels, double value) {
  float* of_section = zf + (4 * (i / 2) + i % 2) * n_channels + channel;
  of_section[0] = float(value);
  of_section[2 * n_channels] = float(value - double(of_section[0]));
}

}  // namespace
"""

_HEADER = f"""
constexpr int ROW = {_ROW};
constexpr float LARGEST_SAMPLE = {LARGEST_SAMPLE}f;
{_COMMON}"""

_LONE = r"""
  size_t n = x_shape[0];
  size_t n_channels = x_shape[1];
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  size_t channel = size_t(blockIdx.x) * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;

  size_t first = size_t(thread) * SAMPLES;
  double values[SAMPLES];
  unsigned taken = load<SAMPLES>(x + channel, first, n, n_channels, values);

  __shared__ double all_z0[THREADS][LANES];
  __shared__ double all_z1[THREADS][LANES];
  __shared__ int all_taken[THREADS][LANES];
  all_taken[thread][lane] = __popc(taken);
  #pragma unroll 1
  for (int section = 0; section < SECTIONS; ++section) {
    Section c = section_at(table, section);
    const double* over = doubles(table) + section * ROW + 5;
    double m00 = over[0], m01 = over[1], m10 = over[2], m11 = over[3];
    double z0 = 0.0, z1 = 0.0;
    double alone[SAMPLES];
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) alone[i] = values[i];
    run<SAMPLES>(c, taken, alone, z0, z1);
    all_z0[thread][lane] = z0;
    all_z1[thread][lane] = z1;
    __syncthreads();
    z0 = state_at(zi, 2 * section, channel, n_channels);
    z1 = state_at(zi, 2 * section + 1, channel, n_channels);
    #pragma unroll 4
    for (int i = 0; i < thread; ++i) {
      if (all_taken[i][lane] == SAMPLES) {
        double next = fma(m00, z0, fma(m01, z1, all_z0[i][lane]));
        z1 = fma(m10, z0, fma(m11, z1, all_z1[i][lane]));
        z0 = next;
      } else {
        for (int k = 0; k < all_taken[i][lane]; ++k) {
          double nothing = 0.0;
          step(c, nothing, z0, z1);
        }
        z0 += all_z0[i][lane];
        z1 += all_z1[i][lane];
      }
    }
    run<SAMPLES>(c, taken, values, z0, z1);
    if (thread == THREADS - 1 && active) {
      set_state(zf, 2 * section, channel, n_channels, z0);
      set_state(zf, 2 * section + 1, channel, n_channels, z1);
    }
    __syncthreads();
  }
  if (active) store<SAMPLES>(y + channel, first, n, n_channels, values);
"""

_PLACE = r"""
  size_t n = x_shape[0];
  size_t n_channels = x_shape[1];
  size_t n_tiles = (n + TILE - 1) / TILE;
  size_t row = LAST_FIRST ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  size_t tile = row * THREADS + threadIdx.y;
  size_t channel = size_t(blockIdx.y) * LANES + threadIdx.x;
  if (tile >= n_tiles || channel >= n_channels) return;
  size_t end = (tile + 1) * TILE < n ? (tile + 1) * TILE : n;
"""

_FILTER = r"""
  #pragma unroll 1
  for (size_t first = tile * TILE; first < end; first += SAMPLES) {
    double values[SAMPLES];
    unsigned taken = load<SAMPLES>(x + channel, first, n, n_channels, values);
    #pragma unroll
    for (int section = 0; section < SECTIONS; ++section) {
      run<SAMPLES>(section_at(table, section), taken, values, z[2 * section], z[2 * section + 1]);
    }
"""

_TILES = (
    _PLACE
    + r"""
  double z[2 * SECTIONS] = {};
  int n_taken = 0;
"""
    + _FILTER
    + r"""
    n_taken += __popc(taken);
  }
  #pragma unroll
  for (int i = 0; i < 2 * SECTIONS; ++i) {
    doubles(tile_state)[(tile * 2 * SECTIONS + i) * n_channels + channel] = z[i];
  }
  tile_taken[tile * n_channels + channel] = n_taken;
"""
)

_LINK = r"""
  size_t n_tiles = tile_taken_shape[0];
  size_t n_channels = tile_taken_shape[1];
  size_t channel = size_t(blockIdx.x) * LANES + threadIdx.x;
  if (channel >= n_channels) return;

  constexpr int SIZE = 2 * SECTIONS;
  // A section's state depends on those before it only: the upper blocks are zero, and take no register.
  double over[SIZE][SIZE];
  double z[SIZE];
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) {
    #pragma unroll
    for (int j = 0; j < SIZE; ++j) {
      if (j / 2 <= i / 2) over[i][j] = doubles(table)[SECTIONS * ROW + i * SIZE + j];
    }
    z[i] = state_at(zi, i, channel, n_channels);
  }
  for (size_t first = 0; first < n_tiles; first += BATCH) {
    double of_tile[BATCH][SIZE];
    int taken[BATCH];
    #pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      size_t tile = first + k < n_tiles ? first + k : n_tiles - 1;
      taken[k] = tile_taken[tile * n_channels + channel];
      #pragma unroll
      for (int i = 0; i < SIZE; ++i) of_tile[k][i] = doubles(tile_state)[(tile * SIZE + i) * n_channels + channel];
    }
    #pragma unroll
    for (int k = 0; k < BATCH; ++k) {
      if (first + k < n_tiles) {
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) doubles(tile_start)[((first + k) * SIZE + i) * n_channels + channel] = z[i];
        if (taken[k] == TILE) {
          double next[SIZE];
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) {
            next[i] = of_tile[k][i];
            #pragma unroll
            for (int j = 0; j < SIZE; ++j) {
              if (j / 2 <= i / 2) next[i] = fma(over[i][j], z[j], next[i]);
            }
          }
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) z[i] = next[i];
        } else {
          #pragma unroll 1
          for (int sample = 0; sample < taken[k]; ++sample) {
            double value = 0.0;
            #pragma unroll
            for (int section = 0; section < SECTIONS; ++section) {
              step(section_at(table, section), value, z[2 * section], z[2 * section + 1]);
            }
          }
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) z[i] += of_tile[k][i];
        }
      }
    }
  }
"""

_RESULT = (
    _PLACE
    + r"""
  double z[2 * SECTIONS];
  #pragma unroll
  for (int i = 0; i < 2 * SECTIONS; ++i) {
    z[i] = doubles(tile_start)[(tile * 2 * SECTIONS + i) * n_channels + channel];
  }
"""
    + _FILTER
    + r"""
    store<SAMPLES>(y + channel, first, n, n_channels, values);
  }
  if (tile == n_tiles - 1) {
    #pragma unroll
    for (int i = 0; i < 2 * SECTIONS; ++i) set_state(zf, i, channel, n_channels, z[i]);
  }
"""
)


@functools.cache
def _kernel(name: str, **constants: int):  # noqa: ANN202 - an opaque callable of MLX
    inputs, outputs, source = {
        "lone": (["x", "zi", "table"], ["y", "zf"], _LONE),
        "tiles": (["x", "table"], ["tile_state", "tile_taken"], _TILES),
        "link": (["tile_state", "tile_taken", "zi", "table"], ["tile_start"], _LINK),
        "result": (["x", "tile_start", "table"], ["y", "zf"], _RESULT),
    }[name]
    return mx.fast.cuda_kernel(
        name=f"ezmsg_mlx_sosfilt_{name}_" + "_".join(map(str, constants.values())),
        input_names=inputs,
        output_names=outputs,
        header=_HEADER,
        # Constants in the source and not as template arguments, which MLX takes apart at each call.
        source="".join(f"constexpr int {key} = {value};\n" for key, value in constants.items()) + source,
    )


def _recurrence(sos: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.longdouble], npt.NDArray[np.longdouble]]:
    """The rows (b0, g0, g1, a1, a2), and the transition of the states of all sections over one sample."""
    b0, b1, b2, _, a1, a2 = sos.astype(np.longdouble).T
    rows = np.stack([b0, b1 - a1 * b0, b2 - a2 * b0, a1, a2], axis=1)
    transition = np.zeros((2 * len(sos), 2 * len(sos)), np.longdouble)
    # What the sections before one make of their states is its input.
    value = np.zeros(2 * len(sos), np.longdouble)
    for i in range(len(sos)):
        z0, z1 = 2 * i, 2 * i + 1
        transition[z0], transition[z1] = rows[i, 1] * value, rows[i, 2] * value
        transition[z0, z0] -= a1[i]
        transition[z0, z1] += 1
        transition[z1, z0] -= a2[i]
        value = b0[i] * value
        value[z0] += 1
    return rows, transition


def table(sos: npt.NDArray[np.float64], tile: int) -> npt.NDArray[np.float64]:
    """What the kernels need of *sos*: rows, each with the transition over :data:`LONE_SAMPLES`; then that over *tile*.

    In extended precision where the machine has it: the transition of a double pole next to 1 over 256 samples has
    entries of 256, and its powers amplify what rounding does to them.
    """
    rows, transition = _recurrence(sos)
    sections = [
        np.concatenate([row, np.linalg.matrix_power(_recurrence(section[None])[1], LONE_SAMPLES).ravel()])
        for row, section in zip(rows, sos, strict=True)
    ]
    over_tile = np.linalg.matrix_power(transition, tile).ravel() if tile else []
    return np.concatenate([*sections, over_tile]).astype(np.float64)


@functools.lru_cache(maxsize=64)
def _device_table(sos: bytes, tile: int) -> mx.array:
    return mx.array(table(np.frombuffer(sos).reshape(-1, 6), tile).view(np.int64))


def tile_size(n_samples: int) -> int:
    """Samples that one thread takes of a message of *n_samples*; few where there are few, or it all waits for one."""
    return 64 if n_samples <= 4096 else 256


def _launch_lone(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_channels = chunk.shape[1]
    lanes = min(LONE_LANES, 1 << (n_channels - 1).bit_length())
    threads = LONE_TILE // LONE_SAMPLES
    y, zf = _kernel("lone", SECTIONS=len(sos), LANES=lanes, THREADS=threads, SAMPLES=LONE_SAMPLES)(
        inputs=[chunk, state, _device_table(sos.tobytes(), 0)],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        grid=(lanes * -(-n_channels // lanes), threads, 1),
        threadgroup=(lanes, threads, 1),
    )
    return y, zf


def _launch_tiles(
    sos: npt.NDArray[np.float64], chunk: mx.array, state: mx.array, size: int, valid_length: mx.array
) -> tuple[mx.array, mx.array]:
    n_samples, n_channels = chunk.shape
    tile = tile_size(n_samples)
    n_tiles = -(-n_samples // tile)
    lanes = min(32, 1 << (n_channels - 1).bit_length())
    threads = THREADS // lanes
    groups = -(-n_channels // lanes)
    constants = {"SECTIONS": len(sos), "LANES": lanes, "TILE": tile, "SAMPLES": SAMPLES}
    coefficients = _device_table(sos.tobytes(), tile)
    states = (n_tiles, 2 * len(sos), n_channels)
    blocks = {
        "grid": (lanes * -(-n_tiles // threads), threads * groups, 1),
        "threadgroup": (lanes, threads, 1),
    }
    tile_state, tile_taken = _kernel("tiles", **constants, THREADS=threads, LAST_FIRST=0)(
        inputs=[chunk, coefficients],
        output_shapes=[states, (n_tiles, n_channels)],
        output_dtypes=[mx.int64, mx.int32],
        **blocks,
    )
    (tile_start,) = _kernel("link", **constants, BATCH=24 // len(sos))(
        inputs=[tile_state, tile_taken, state, coefficients],
        output_shapes=[states],
        output_dtypes=[mx.int64],
        grid=(lanes * groups, 1, 1),
        threadgroup=(lanes, 1, 1),
    )
    # The last samples that the first launch read are those that may still be in the second-level cache.
    y, zf = _kernel("result", **constants, THREADS=threads, LAST_FIRST=1)(
        inputs=[chunk, tile_start, coefficients],
        output_shapes=[(size, n_channels), state.shape],
        output_dtypes=[mx.float32, mx.float32],
        **blocks,
    )
    return y, zf


def sosfilt(
    x: mx.array, sos: npt.NDArray[np.float64], zi: mx.array, axis: int, chunk_sizes: tuple[int, ...]
) -> tuple[mx.array, mx.array]:
    """See :func:`ezmsg.mlx.sosfilt.sosfilt`. Lazy. Nothing is compiled for a size, so *chunk_sizes* do not matter."""
    n_samples = x.shape[axis]
    lone = n_samples <= LONE_TILE
    y, flat_zi = time_first(x, axis), time_first(zi, axis + 1, lead=1)
    states = []
    step = len(sos) if lone else MAX_SECTIONS
    for first in range(0, len(sos), step):
        sections = slice(first, first + step)
        launch = functools.partial(_launch_lone if lone else _launch_tiles, sos[sections])
        y, state = chunked_scan(y, n_samples, (grid_size(n_samples),), flat_zi[sections], launch, axis=0, pad=False)
        states.append(state)
    zf = states[0] if len(states) == 1 else mx.concatenate(states)
    return time_back(y, x.shape, axis), time_back(zf, zi.shape, axis + 1, lead=1)
