// z-scores of each channel: (x[n] - mean[n]) / sqrt(var[n]), mean and variance being those of the samples so far with
// the weights of a moving average.
//
// A thread takes mean and variance of its strip alone, links them to those before the strip, and goes over its samples
// again from there. See ezmsg.mlx.kernels.contract for the formulas, in which nothing cancels. Means and variances are
// pairs while they are added up: in float32 alone, what a sample adds to a long memory would be lost.

#include "strips.h"

namespace ezmsg_mlx {

constant constexpr float LARGEST_SCORED = 1e18f;
// Powers of two, not written as such: hexadecimal floats are newer than some of Metal's compilers.
constant constexpr float SMALLEST_VARIANCE = 7.52316384526264e-37f;
constant constexpr float RESOLUTION = 2.3283064365386963e-10f;

struct Statistics {
  Pair mean;
  Pair variance;
};

// How far b is from a pair.
inline float from(Pair a, Pair b) { return (b.high - a.high) + (b.low - a.low); }

// Those of some samples and of later ones, of which *share* of the weight is and *rest* of it is not. The larger part
// is the one that is moved, so that a first sample of any size is forgotten as fast as its weight.
inline Statistics linked(Statistics a, Statistics b, float share, float rest) {
  float delta = from(a.mean, b.mean);
  float spread = delta * (delta * (share * rest));
  if (share <= 0.5f) {
    return {moved(a.mean, share * delta), moved(a.variance, fma(share, from(a.variance, b.variance), spread))};
  }
  return {moved(b.mean, -rest * delta), moved(b.variance, fma(rest, from(b.variance, a.variance), spread))};
}

// The same by the weights: that of a has decayed by the time of b.
inline Statistics linked(Statistics a, Statistics b, float weight_a, float weight_b, float decay) {
  float weight_left = decay * weight_a;
  float one_over = 1.0f / (weight_left + weight_b);
  return linked(a, b, weight_b * one_over, weight_left * one_over);
}

}  // namespace ezmsg_mlx

KERNEL {
  using namespace ezmsg_mlx;
#include "place.inl"

  float alpha = table[0];
  float beta = table[1];

  // Of strips, and of blocks of BLOCK strips: to link one strip after the other would take three times as long.
  threadgroup float all_means[2 * THREADS];
  threadgroup float all_variances[2 * THREADS];
  threadgroup uint all_taken[THREADS];
  threadgroup float block_means[2 * BLOCKS];
  threadgroup float block_variances[2 * BLOCKS];
  threadgroup uint block_taken[BLOCKS];
  uint block = strip / BLOCK;
  uint n_blocks = (n_strips + BLOCK - 1) / BLOCK;
  bool is_last_of_block = strip % BLOCK == BLOCK - 1 || strip == n_strips - 1;

  Statistics statistics = {
      Pair{zi[channel], zi[n_channels + channel]}, Pair{zi[2 * n_channels + channel], zi[3 * n_channels + channel]}};
  Pair weight = {zi[4 * n_channels + channel], zi[5 * n_channels + channel]};

  for (uint start = 0; start < n; start += n_strips * SAMPLES) {
    uint first = start + strip * SAMPLES;
    uint inside = first < n ? min(n - first, SAMPLES) : 0u;
    size_t at = size_t(first) * n_channels + channel;

    float values[SAMPLES];
    uint taken = 0;
    uint n_taken = 0;
    Statistics alone = {Pair{0.0f, 0.0f}, Pair{0.0f, 0.0f}};
#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      values[i] = i < inside ? x[at + size_t(i) * n_channels] : no_sample();
      if (metal::fabs(values[i]) <= LARGEST_SCORED) {
        alone = linked(alone, {{values[i], 0.0f}, {0.0f, 0.0f}}, table[SHARES + n_taken], table[RESTS + n_taken]);
        taken |= 1u << i;
        ++n_taken;
      }
    }
    all_means[own] = alone.mean.high;
    all_means[own + THREADS] = alone.mean.low;
    all_variances[own] = alone.variance.high;
    all_variances[own + THREADS] = alone.variance.low;
    all_taken[own] = n_taken;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // The strips before this one in its block alone, and with this one all of the block.
    Statistics before = {Pair{0.0f, 0.0f}, Pair{0.0f, 0.0f}};
    uint n_before = 0;
    for (uint i = block * BLOCK; i < strip; ++i) {
      uint other = i * lanes + lane;
      uint n_here = all_taken[other];
      if (n_here > 0) {
        Statistics here = {Pair{all_means[other], all_means[other + THREADS]},
            Pair{all_variances[other], all_variances[other + THREADS]}};
        before = linked(before, here, table[GAINS + n_before], table[GAINS + n_here], table[DECAYS + n_here]);
        n_before += n_here;
      }
    }
    if (is_last_of_block) {
      uint place = block * lanes + lane;
      Statistics total = before;
      if (n_taken > 0) {
        total = linked(before, alone, table[GAINS + n_before], table[GAINS + n_taken], table[DECAYS + n_taken]);
      }
      block_means[place] = total.mean.high;
      block_means[place + BLOCKS] = total.mean.low;
      block_variances[place] = total.variance.high;
      block_variances[place + BLOCKS] = total.variance.low;
      block_taken[place] = n_before + n_taken;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // Before this block, and after all.
    float lack = (1.0f - weight.high) - weight.low;
    Statistics of_stream = statistics;
    uint n_of_stream = 0;
    uint n_until = 0;
    for (uint i = 0; i < n_blocks; ++i) {
      if (i == block) {
        of_stream = statistics;
        n_of_stream = n_until;
      }
      uint other = i * lanes + lane;
      uint n_here = block_taken[other];
      if (n_here > 0) {
        float until = weight.high + fma(lack, table[GAINS + n_until], weight.low);
        Statistics here = {Pair{block_means[other], block_means[other + BLOCKS]},
            Pair{block_variances[other], block_variances[other + BLOCKS]}};
        statistics = linked(statistics, here, until, table[GAINS + n_here], table[DECAYS + n_here]);
        n_until += n_here;
      }
    }
    float until = weight.high + fma(lack, table[GAINS + n_of_stream], weight.low);
    if (n_before > 0) {
      before = linked(of_stream, before, until, table[GAINS + n_before], table[DECAYS + n_before]);
    } else {
      before = of_stream;
    }

    uint k = n_of_stream + n_before;
    until = weight.high + fma(lack, table[GAINS + k], weight.low);
#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      float result = values[i];
      if (taken >> i & 1u) {
        ++k;
        float now = weight.high + fma(lack, table[GAINS + k], weight.low);
        float one_over = 1.0f / now;
        float share = alpha * one_over;
        float rest = beta * until * one_over;
        float distance = rest * ((result - before.mean.high) - before.mean.low);
        before = linked(before, {{result, 0.0f}, {0.0f, 0.0f}}, share, rest);
        until = now;
        float least = RESOLUTION * before.mean.high;
        bool varies = before.variance.high > SMALLEST_VARIANCE && before.variance.high > least * least;
        result = varies ? distance / metal::sqrt(before.variance.high) : 0.0f;
      }
      if (i < inside && is_active) y[at + size_t(i) * n_channels] = result;
    }

    weight = moved(weight, lack * table[GAINS + n_until]);
  }

  if (strip == 0 && is_active) {
    zf[channel] = statistics.mean.high;
    zf[n_channels + channel] = statistics.mean.low;
    zf[2 * n_channels + channel] = statistics.variance.high;
    zf[3 * n_channels + channel] = statistics.variance.low;
    zf[4 * n_channels + channel] = weight.high;
    zf[5 * n_channels + channel] = weight.low;
  }
}
