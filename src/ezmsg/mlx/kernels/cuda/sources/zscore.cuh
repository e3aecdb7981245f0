#pragma once
#include "samples.cuh"

namespace {

// As in layout.py.
constexpr float LARGEST_SCORED = 1e+18f;
constexpr float SMALLEST_VARIANCE = 0x1p-120f;
constexpr float RESOLUTION = 0x1p-32f;

__device__ bool is_scored(float value) { return fabsf(value) <= LARGEST_SCORED; }

// MLX has no float64 on a GPU, so it travels in arrays of int64: alpha, what is left of a weight after 0 to TILE
// samples, and what they weigh.
__device__ const double* doubles(const int64_t* values) { return reinterpret_cast<const double*>(values); }

// Of a stretch of samples; see contract.py.
struct Moments {
  double mean, var, weight;
};

// The stretch *later*, after which *decay* is left of what was before, and the one before it as one.
__device__ Moments joined(const Moments& earlier, const Moments& later, double decay) {
  double before = decay * earlier.weight;
  double weight = before + later.weight;
  if (!(weight > 0.0)) return earlier;
  double share = later.weight / weight;
  double rest = before / weight;
  double delta = later.mean - earlier.mean;
  // From whichever mean is the nearer one: what rounding takes is then small beside the deviation.
  double mean = share > 0.5 ? fma(-rest, delta, later.mean) : fma(share, delta, earlier.mean);
  return {mean, fma(rest, earlier.var, fma(share, later.var, (rest * delta) * (share * delta))), weight};
}

// Mean and variance sample by sample in float32: the mean as a pair, so that no offset and no first sample of any size
// takes bits from either.
struct Running {
  float mean, low, var;

  // Takes a sample whose share in the weight is *share*, and that of all before it *rest*; gives what it is off the
  // mean.
  __device__ float take(float sample, float share, float rest) {
    float delta = (sample - mean) - low;
    float off = rest * delta;
    bool is_near = share > 0.5f;
    float base = is_near ? sample : mean;
    float shift = is_near ? -off : fmaf(share, delta, low);
    // Exactly: Knuth, The Art of Computer Programming, vol. 2, 4.2.2.
    mean = base + shift;
    float from_shift = mean - base;
    low = (base - (mean - from_shift)) + (shift - from_shift);
    var = rest * fmaf(share * delta, delta, var);
    return off;
  }
};

__device__ float score(float off, const Running& state) {
  float rounding = RESOLUTION * state.mean;
  return state.var > fmaxf(rounding * rounding, SMALLEST_VARIANCE) ? off * rsqrtf(state.var) : 0.0f;
}

__device__ Moments moments_before(const float* zi, size_t channel, size_t n_channels) {
  return {pair_at(zi, channel, n_channels), pair_at(zi + 2 * n_channels, channel, n_channels),
      pair_at(zi + 4 * n_channels, channel, n_channels)};
}

}  // namespace
