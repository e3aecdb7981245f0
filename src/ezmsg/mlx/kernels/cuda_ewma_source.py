"""Source of the kernels of :mod:`ezmsg.mlx.kernels.cuda`, which says what they do.

Constants that it leaves open: LANES and THREADS of a block along channels and time; SAMPLES of a thread; TILE, the
samples of a block.
"""

from .cuda_lookback import LOOK_BACK
from .cuda_samples import COPIES, PLACE

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

  // What this thread's samples alone make of a state of zero; one that was there decays with each finite sample.
  bool all = true;
  float state = 0.0f;
  #pragma unroll UNROLL
  for (int i = 0; i < SAMPLES; ++i) {
    float deviation = (samples[i * STRIDE] - before.high) - before.low;
    all = all & (fabsf(deviation) < LARGEST);
    state = beta_f * fmaf(alpha_f, deviation, state);
  }
  int n_finite = SAMPLES;
  if (!all) {
    state = 0.0f;
    n_finite = 0;
    #pragma unroll UNROLL
    for (int i = 0; i < SAMPLES; ++i) {
      float deviation = (samples[i * STRIDE] - before.high) - before.low;
      if (fabsf(deviation) < LARGEST) {
        state = beta_f * fmaf(alpha_f, deviation, state);
        ++n_finite;
      }
    }
  }
  __shared__ float all_states[THREADS][LANES];
  __shared__ float all_decays[THREADS][LANES];
  all_states[thread][lane] = state;
  all_decays[thread][lane] = coefficients[4 + n_finite];
"""

_LONE = r"""
  __syncthreads();
  state = float(before.state);
"""

_LINK = r"""
  __shared__ int all_finite[THREADS][LANES];
  all_finite[thread][lane] = n_finite;
  __syncthreads();
  double alone = 0.0;
  int of_tile = 0;
  if (thread == 0) {
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(all_decays[i][lane], total, all_states[i][lane]);
      of_tile += all_finite[i][lane];
    }
    alone = double(total);
  }
  __shared__ double starts[1][LANES];
  double after;
  link<1, THREADS>(
      told, tile, channel, n_channels, of_tile, &alone, starts, &after,
      [&](double* of_channel) { *of_channel = before.state; },
      [&](const double (*alones)[1][LANES], const int (*finite)[LANES], int begin, int end, double* of_channel) {
        double beta_tile = double(coefficients[2]) + double(coefficients[3]);
        #pragma unroll 1
        for (int i = begin; i < end; ++i) {
          double decay = finite[i][lane] == TILE ? beta_tile : power(1.0 - alpha, finite[i][lane]);
          *of_channel = fma(decay, *of_channel, alones[i][0][lane]);
        }
      });
  state = float(starts[0][lane]);
"""

_RESULT = r"""
  #pragma unroll
  for (int i = 0; i < THREADS - 1; ++i) {
    if (i < thread) state = fmaf(all_decays[i][lane], state, all_states[i][lane]);
  }
  if (!active) return;
  if (all) {
    #pragma unroll UNROLL
    for (int i = 0; i < SAMPLES; ++i) {
      float deviation = (samples[i * STRIDE] - before.high) - before.low;
      float moved = fmaf(alpha_f, deviation, state);
      state = beta_f * moved;
      to[size_t(i) * n_channels] = before.high + (before.low + moved);
    }
  } else {
    #pragma unroll UNROLL
    for (int i = 0; i < SAMPLES; ++i) {
      float deviation = (samples[i * STRIDE] - before.high) - before.low;
      float result = samples[i * STRIDE];
      if (fabsf(deviation) < LARGEST) {
        float moved = fmaf(alpha_f, deviation, state);
        state = beta_f * moved;
        result = before.high + (before.low + moved);
      }
      if (i < inside) to[size_t(i) * n_channels] = result;
    }
  }
  if (thread == THREADS - 1 && tile == (n - 1) / TILE) {
    double of_message = (1.0 - alpha) * before.average + double(state);
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
