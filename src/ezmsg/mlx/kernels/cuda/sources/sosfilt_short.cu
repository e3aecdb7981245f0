#include "sections.cuh"

namespace {

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
    if (inside && is_taken(value)) taken |= 1u << i;
    values[i] = value;
  }
  return taken;
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

// The samples that are not taken are in *values* as they were.
template <int SAMPLES>
__device__ void store(float* y, size_t first, size_t n, size_t n_channels, const double* values) {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) {
    if (first + i < n) y[(first + i) * n_channels] = float(values[i]);
  }
}

}  // namespace

KERNEL {
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
    double local[SAMPLES];
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) local[i] = values[i];
    run<SAMPLES>(c, taken, local, z0, z1);
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
}
