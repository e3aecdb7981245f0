"""Source of the kernels of :mod:`ezmsg.mlx.kernels.cuda_sosfilt`, which says what they do.

Constants that it leaves open: SECTIONS; SAMPLES that a thread keeps in registers; LANES and THREADS of a block along
channels and time; TILE, the samples that a thread takes of a longer message; BATCH, the tiles whose states are loaded
together; LAST_FIRST, whether tiles come in reverse.
"""

from .layout import LARGEST_SAMPLE

ROW = 9
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

HEADER = f"""
constexpr int ROW = {ROW};
constexpr float LARGEST_SAMPLE = {LARGEST_SAMPLE}f;
{_COMMON}"""

LONE = r"""
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

TILES = (
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

LINK = r"""
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

RESULT = (
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
