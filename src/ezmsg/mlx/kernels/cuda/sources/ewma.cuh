#pragma once

namespace {

// Beyond this a deviation is taken for one that is not finite, before sums of its kind overflow.
constexpr float LARGEST = 3.4e38f;

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

// Stands for a sample past the end, which leaves the state alone like one that is not finite.
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

}  // namespace
