#pragma once

namespace {

// As in layout.py.
constexpr float LARGEST_SAMPLE = 1e+30f;

__device__ bool is_taken(float value) { return fabsf(value) <= LARGEST_SAMPLE; }

// Stands for a sample past the end, which leaves the state alone like one that is not taken.
__device__ float no_sample() { return __int_as_float(0x7fffffff); }

__device__ double power(double base, int exponent) {
  double result = 1.0;
  #pragma unroll 1
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result *= base;
    base *= base;
  }
  return result;
}

__device__ double pair_at(const float* pairs, size_t channel, size_t n_channels) {
  return double(pairs[channel]) + double(pairs[n_channels + channel]);
}

__device__ void put_pair(float* pairs, size_t channel, size_t n_channels, double value) {
  float high = float(value);
  pairs[channel] = high;
  pairs[n_channels + channel] = float(value - double(high));
}

}  // namespace
