#pragma once
#include "samples.cuh"

namespace {

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
  double state = pair_at(zi, channel, n_channels);
  if (alpha > 0.5) return {0.0, 0.0f, 0.0f, state};
  double average = state / (1.0 - alpha);
  float high = float(average);
  return {average, high, float(average - double(high)), 0.0};
}

}  // namespace
