"""Source of the kernels of :mod:`ezmsg.mlx.kernels.cuda_sosfilt`, which says what they do.

Constants that it leaves open: SECTIONS; SAMPLES that a thread keeps in registers; LANES and THREADS of a block along
channels and time; TILE, the samples of a block of a longer message.
:data:`LONG` follows :data:`ezmsg.mlx.kernels.cuda_lookback.PLACE`.
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
template <int SAMPLES, typename Value>
__device__ unsigned load(const float* x, size_t first, size_t n, size_t n_channels, Value* values) {
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
  if (taken == ~0u >> (32 - SAMPLES)) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) step(c, values[i], z0, z1);
  } else {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) {
      if (taken >> i & 1u) step(c, values[i], z0, z1);
    }
  }
}

// The sections of a message, and their transition over the samples of a thread, and over those of a tile. In shared
// memory and volatile, since registers are what limits the blocks that a multiprocessor holds.
template <int SECTIONS>
struct Shared {
  volatile double rows[SECTIONS][5];
  volatile double over[2][2 * SECTIONS][2 * SECTIONS];

  __device__ void sections(Section* result) const {
    #pragma unroll
    for (int i = 0; i < SECTIONS; ++i) result[i] = {rows[i][0], rows[i][1], rows[i][2], rows[i][3], rows[i][4]};
  }
};

template <int SECTIONS>
__device__ float cascade(const Section* sections, double value, double* z) {
  #pragma unroll
  for (int i = 0; i < SECTIONS; ++i) step(sections[i], value, z[2 * i], z[2 * i + 1]);
  return float(value);
}

// *samples* are in shared memory, *stride* apart, and so are the results.
template <int SECTIONS, int SAMPLES>
__device__ void run_all(
    const Shared<SECTIONS>& shared, unsigned taken, const float* samples, float* results, int stride, double* z) {
  Section sections[SECTIONS];
  shared.sections(sections);
  if (taken == ~0u >> (32 - SAMPLES)) {
    #pragma unroll 4
    for (int i = 0; i < SAMPLES; ++i) {
      float result = cascade<SECTIONS>(sections, samples[i * stride], z);
      if (results) results[i * stride] = result;
    }
  } else {
    #pragma unroll 1
    for (int i = 0; i < SAMPLES; ++i) {
      if (taken >> i & 1u) {
        float result = cascade<SECTIONS>(sections, samples[i * stride], z);
        if (results) results[i * stride] = result;
      }
    }
  }
}

// The state *z* goes over *taken* samples that make *alone* of a state of zero; these are those of a thread or, where
// *is_tile*, of a tile. No section knows of the ones behind it.
template <int SECTIONS>
__device__ void go_on(
    const Shared<SECTIONS>& shared, bool is_tile, int taken, int all, const double* alone, double* z) {
  constexpr int SIZE = 2 * SECTIONS;
  if (taken == all) {
    double next[SIZE];
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      next[i] = alone[i];
      #pragma unroll
      for (int k = 0; k < SIZE; ++k) {
        if (k / 2 <= i / 2) next[i] = fma(shared.over[is_tile][i][k], z[k], next[i]);
      }
    }
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) z[i] = next[i];
  } else {
    #pragma unroll 1
    for (int i = 0; i < taken; ++i) {
      Section sections[SECTIONS];
      shared.sections(sections);
      cascade<SECTIONS>(sections, 0.0, z);
    }
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) z[i] += alone[i];
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

LONG = r"""
  constexpr int SIZE = 2 * SECTIONS;
  constexpr int STRIDE = THREADS * LANES;
  __shared__ float samples_of_all[SAMPLES * STRIDE];
  float* samples = samples_of_all + thread * LANES + lane;
  unsigned taken = 0;
  #pragma unroll
  for (int i = 0; i < SAMPLES; i += 8) {
    float values[8];
    taken |= load<8>(x + channel, first + i, n, n_channels, values) << i;
    #pragma unroll
    for (int k = 0; k < 8; ++k) samples[(i + k) * STRIDE] = values[k];
  }
  __shared__ Shared<SECTIONS> shared;
  for (int i = thread * LANES + lane; i < 5 * SECTIONS; i += THREADS * LANES) {
    shared.rows[i / 5][i % 5] = doubles(table)[i / 5 * ROW + i % 5];
  }
  for (int i = thread * LANES + lane; i < 2 * SIZE * SIZE; i += THREADS * LANES) {
    (&shared.over[0][0][0])[i] = doubles(table)[SECTIONS * ROW + i];
  }
  __syncthreads();

  double z[SIZE] = {};
  run_all<SECTIONS, SAMPLES>(shared, taken, samples, nullptr, STRIDE, z);
  __shared__ double all_z[THREADS][SIZE][LANES];
  __shared__ int all_taken[THREADS][LANES];
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) all_z[thread][i][lane] = z[i];
  all_taken[thread][lane] = __popc(taken);
  __shared__ double befores[SIZE][LANES];
  for (int i = thread; i < SIZE; i += THREADS) befores[i][lane] = state_at(zi, i, channel, n_channels);
  __syncthreads();

  double alone[SIZE] = {};
  int of_tile = 0;
  if (thread == 0) {
    #pragma unroll 1
    for (int i = 0; i < THREADS; ++i) {
      #pragma unroll
      for (int k = 0; k < SIZE; ++k) z[k] = all_z[i][k][lane];
      go_on<SECTIONS>(shared, false, all_taken[i][lane], SAMPLES, z, alone);
      of_tile += all_taken[i][lane];
    }
  }
  __shared__ double starts[SIZE][LANES];
  __shared__ double afters[SIZE][LANES];
  link<SIZE, THREADS>(
      told, tile, channel, n_channels, of_tile, alone, befores, starts, afters,
      [&](int n_taken, const double* of_others, double* state) {
        go_on<SECTIONS>(shared, true, n_taken, TILE, of_others, state);
      });
  if (thread == 0 && active && tile == (n - 1) / TILE) {
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) set_state(zf, i, channel, n_channels, afters[i][lane]);
  }

  double state[SIZE];
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) state[i] = starts[i][lane];
  #pragma unroll 1
  for (int i = 0; i < thread; ++i) {
    #pragma unroll
    for (int k = 0; k < SIZE; ++k) z[k] = all_z[i][k][lane];
    go_on<SECTIONS>(shared, false, all_taken[i][lane], SAMPLES, z, state);
  }
  if (!active) return;
  run_all<SECTIONS, SAMPLES>(shared, taken, samples, samples, STRIDE, state);
  #pragma unroll 8
  for (int i = 0; i < SAMPLES; ++i) {
    if (first + i < n) y[(first + i) * n_channels + channel] = samples[i * STRIDE];
  }
"""
