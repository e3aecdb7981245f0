#pragma once
#include "samples.cuh"

constexpr int ROW = 9;

namespace {

// y = b0 * x + z0, then z0 = z1 - a1 * z0 + g0 * x and z1 = g1 * x - a2 * z0 of before: scipy's recurrence with y
// put in, in which one sample waits for 1.5 operations of the sample before it, and not for 2.
struct Section {
  double b0, g0, g1, a1, a2;
};

// MLX has no float64 on a GPU, so it travels in arrays of int64.
__device__ const double* doubles(const int64_t* values) { return reinterpret_cast<const double*>(values); }

__device__ void step(const Section& c, double& value, double& z0, double& z1) {
  double y = fma(c.b0, value, z0);
  double next = fma(-c.a1, z0, fma(c.g0, value, z1));
  z1 = fma(-c.a2, z0, c.g1 * value);
  z0 = next;
  value = y;
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
