// A moving average of each channel, y[n] = y[n-1] + alpha * (x[n] - y[n-1]), or that divided by the sum of its weights.
//
// Computed on the deviation from the average before the tile: in float32, what a long memory moves by is lost beside
// the average itself. A thread runs over its strip from a state of zero, and learns from the strips before it what the
// state was. As in scipy's lfilter, the state is (1 - alpha) times the average.

#include "strips.h"

namespace ezmsg_mlx {

// Of the constants at the front of the table. A short memory gains nothing from deviations, and would divide a state
// that need not be its own by next to nothing.
constant constexpr float SHORT_MEMORY = 0.5f;

}  // namespace ezmsg_mlx

KERNEL {
  using namespace ezmsg_mlx;
#include "place.inl"
  bool is_corrected = zi_shape[0] == 4;

  float alpha = table[0];
  float beta = table[1];
  float alpha_over_beta = table[2];
  float one_over_beta = table[3];
  bool is_short = alpha > SHORT_MEMORY;

  // What is left of a state after some samples.
  threadgroup float decays[SAMPLES + 1];
  for (uint k = own; k <= SAMPLES; k += n_strips * lanes) decays[k] = table[DECAYS + k];

  // Of two tiles in turn, so that one may still be read while the next is written.
  threadgroup float all_alone[2 * THREADS];
  threadgroup uint all_taken[2 * THREADS];

  Pair given = {zi[channel], zi[n_channels + channel]};
  Pair average = {0.0f, 0.0f};
  float state = 0.0f;
  if (is_short) {
    state = given.high + given.low;
  } else {
    average = moved(given, fma(alpha_over_beta, given.high, alpha_over_beta * given.low));
  }
  Pair weight = {1.0f, 0.0f};
  if (is_corrected) weight = {zi[2 * n_channels + channel], zi[3 * n_channels + channel]};

  uint turn = 0;
  for (uint start = 0; start < n; start += n_strips * SAMPLES) {
    uint first = start + strip * SAMPLES;
    uint inside = first < n ? min(n - first, SAMPLES) : 0u;
    size_t at = size_t(first) * n_channels + channel;

    // What the samples of this strip alone make of a state of zero; and in the place of each, of the average.
    float values[SAMPLES];
    uint taken = 0;
    uint n_taken = 0;
    float alone = 0.0f;
#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      values[i] = i < inside ? x[at + size_t(i) * n_channels] : no_sample();
      if (is_taken(values[i])) {
        values[i] = fma(alpha, (values[i] - average.high) - average.low, alone);
        alone = beta * values[i];
        taken |= 1u << i;
        ++n_taken;
      }
    }
    all_alone[turn * THREADS + own] = alone;
    all_taken[turn * THREADS + own] = n_taken;
    threadgroup_barrier(mem_flags::mem_threadgroup);

    // The state before this strip and after all, and how many samples were taken until then.
    float before = state;
    uint n_before = 0;
    uint n_until = 0;
    for (uint i = 0; i < n_strips; ++i) {
      if (i == strip) {
        before = state;
        n_before = n_until;
      }
      uint other = turn * THREADS + i * lanes + lane;
      state = fma(decays[all_taken[other]], state, all_alone[other]);
      n_until += all_taken[other];
    }

    // Each result has its part of the state added at once: to go on from it sample by sample would round that as often.
    float rest = (1.0f - weight.high) - weight.low;
    uint k = 0;
#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      float result = values[i];
      if (taken >> i & 1u) {
        result = average.high + (average.low + fma(decays[k], before, result));
        ++k;
        if (is_corrected) result /= weight.high + fma(rest, table[GAINS + n_before + k], weight.low);
      }
      if (i < inside && is_active) y[at + size_t(i) * n_channels] = result;
    }

    if (!is_short) {
      average = moved(average, state * one_over_beta);
      state = 0.0f;
    }
    if (is_corrected) weight = moved(weight, rest * table[GAINS + n_until]);
    turn = 1 - turn;
  }

  if (strip == 0 && is_active) {
    Pair last = {state, 0.0f};
    if (!is_short) last = moved(average, -fma(alpha, average.high, alpha * average.low));
    zf[channel] = last.high;
    zf[n_channels + channel] = last.low;
    if (is_corrected) {
      zf[2 * n_channels + channel] = weight.high;
      zf[3 * n_channels + channel] = weight.low;
    }
  }
}
