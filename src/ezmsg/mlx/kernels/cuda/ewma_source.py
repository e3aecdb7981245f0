"""Source of the kernels of :mod:`ezmsg.mlx.kernels.cuda.ewma`, which says what they do.

Constants that it leaves open: LANES and THREADS of a block along channels and time; SAMPLES of a thread; TILE, the
samples of a block.
"""

from .lookback import LOOK_BACK
from .samples import COPIES, PLACE

_COMMON = r"""
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
"""

_REGISTERS = r"""
  float samples[SAMPLES];
  constexpr int STRIDE = 1;
  constexpr int UNROLL = SAMPLES;
  constexpr int UNROLL_SOME = SAMPLES;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = from[size_t(i) * n_channels];
  } else {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = i < inside ? from[size_t(i) * n_channels] : no_sample();
  }
"""

_SHARED = r"""
  constexpr int STRIDE = THREADS * LANES;
  constexpr int UNROLL = 8;
  constexpr int UNROLL_SOME = 1;
  __shared__ float samples_of_all[SAMPLES * STRIDE];
  float* samples = samples_of_all + thread * LANES + lane;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) begin_copy(samples + i * STRIDE, from + size_t(i) * n_channels);
    end_copies();
  } else {
    #pragma unroll 1
    for (int i = 0; i < SAMPLES; ++i) samples[i * STRIDE] = i < inside ? from[size_t(i) * n_channels] : no_sample();
  }
"""

_ALONE = r"""
  double alpha = double(coefficients[0]) + double(coefficients[1]);
  float alpha_f = coefficients[0];
  float beta_f = coefficients[5];
  Before before = state_before(zi, channel, n_channels, alpha);
  // What is left of a state after some finite samples.
  __shared__ float decays[SAMPLES + 1];
  for (int i = thread * LANES + lane; i <= SAMPLES; i += THREADS * LANES) decays[i] = coefficients[4 + i];

  // What this thread's samples alone make of a state of zero; and in the place of each that is finite, of the average.
  float alone = 0.0f;
  int n_finite = 0;
  #pragma unroll UNROLL
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i * STRIDE] - before.high) - before.low;
    if (fabsf(deviation) < LARGEST) {
      float moved = fmaf(alpha_f, deviation, alone);
      samples[i * STRIDE] = moved;
      alone = beta_f * moved;
      ++n_finite;
    }
  }
  __shared__ float all_alone[THREADS][LANES];
  __shared__ float all_decays[THREADS][LANES];
  all_alone[thread][lane] = alone;
  all_decays[thread][lane] = coefficients[4 + n_finite];
"""

_LONE = r"""
  __syncthreads();
  float state = float(before.state);
"""

_LINK = r"""
  __shared__ int all_finite[THREADS][LANES];
  all_finite[thread][lane] = n_finite;
  __syncthreads();
  double linked = 0.0;
  int of_tile = 0;
  if (thread == 0) {
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(all_decays[i][lane], total, all_alone[i][lane]);
      of_tile += all_finite[i][lane];
    }
    linked = double(total);
  }
  double after;
  link<1, THREADS, TILE>(
      told, tile, channel, n_channels, of_tile, &linked, &after,
      [&](double* of_channel) { *of_channel = before.state; },
      [&](const double* of_tile, int finite, double* of_channel) {
        double decay = finite == TILE ? double(coefficients[2]) + double(coefficients[3]) : power(1.0 - alpha, finite);
        *of_channel = fma(decay, *of_channel, *of_tile);
      },
      [&] {
        double decay = double(coefficients[2]) + double(coefficients[3]);
        return [decay](const double* of_tile, double* of_channel) { *of_channel = fma(decay, *of_channel, *of_tile); };
      });
  float state = float(linked);
"""

_RESULT = r"""
  #pragma unroll
  for (int i = 0; i < THREADS - 1; ++i) {
    if (i < thread) state = fmaf(all_decays[i][lane], state, all_alone[i][lane]);
  }
  if (!active) return;
  // Each result has its part of the state added at once: to go on from it sample by sample would round that as often.
  if (n_finite == SAMPLES) {
    #pragma unroll UNROLL
    for (int i = 0; i < SAMPLES; ++i) {
      to[size_t(i) * n_channels] = before.high + (before.low + fmaf(decays[i], state, samples[i * STRIDE]));
    }
  } else {
    // The samples themselves are no longer there, and needed only to tell which are not finite.
    bool all = n_finite == inside;
    int n_before = 0;
    #pragma unroll UNROLL_SOME
    for (int i = 0; i < SAMPLES; ++i) {
      if (i < inside) {
        float result = all ? before.high : from[size_t(i) * n_channels];
        if (fabsf((result - before.high) - before.low) < LARGEST) {
          result = before.high + (before.low + fmaf(decays[n_before++], state, samples[i * STRIDE]));
        }
        to[size_t(i) * n_channels] = result;
      }
    }
  }
  if (thread == THREADS - 1 && tile == (n - 1) / TILE) {
    double of_message = (1.0 - alpha) * before.average + double(fmaf(decays[n_finite], state, alone));
    float high = float(of_message);
    zf[channel] = high;
    zf[n_channels + channel] = float(of_message - double(high));
  }
"""

LONE_HEADER = _COMMON
LONE = PLACE + _REGISTERS + _ALONE + _LONE + _RESULT
"""For a message that is one block along time."""

LONG_HEADER = _COMMON + COPIES + LOOK_BACK
LONG = PLACE + _SHARED + _ALONE + _LINK + _RESULT
"""For a longer one."""
