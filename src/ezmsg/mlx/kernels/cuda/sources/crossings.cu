#pragma once

#define UNROLL _Pragma("unroll")

namespace {

// As in ezmsg.mlx.kernels.crossings and layout.py.
constexpr float LARGEST_SCALED = 1e+15f;
constexpr float SMALLEST_VARIANCE = 0x1p-120f;
constexpr float RESOLUTION = 0x1p-32f;
constexpr float UNDER = 1.0f;
constexpr float OVER = 2.0f;
constexpr float NORMAL = 1.4826022185056018f;
constexpr float STEP = 1.1664f;
constexpr float EAGERNESS = 7.0f;
constexpr int NONE = 0;
constexpr int ZSCORE = 1;
constexpr int RMS = 2;

__device__ float magnitude(float value) { return fabsf(value); }

__device__ float root(float value) { return sqrtf(value); }

// A value as float32, and what that rounding lost.
struct Pair {
  float high, low;
};

// The sum of a pair and what is small beside it (Knuth, The Art of Computer Programming, vol. 2, 4.2.2).
__device__ Pair moved(const Pair& value, float change) {
  float b = value.low + change;
  float total = value.high + b;
  float from_b = total - value.high;
  return {total, (value.high - (total - from_b)) + (b - from_b)};
}

}  // namespace

KERNEL {
  unsigned channel = blockIdx.x * LANES + threadIdx.x;
  if (channel >= unsigned(x_shape[1])) return;
#include "crossings.inl"
}
