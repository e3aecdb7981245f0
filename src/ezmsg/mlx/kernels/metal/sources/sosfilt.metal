// A cascade of second-order sections over each channel.
//
// Each section is in the form of ezmsg.mlx.kernels.sections, and what is computed is the difference of its state from
// that before the tile. A thread runs over its strip from a difference of zero, learns from the strips before it what
// the difference was, and runs again from there; its results are what the next section gets. Between tiles the states
// are in zf, as scipy's: that takes any number of sections.

#include "strips.h"

namespace ezmsg_mlx {

// s += (c00 * s[0] + s[1], c10 * s[0]) + inputs * x + constant, and y = b0 * x + s[0].
struct Section {
  float b0;
  float in0, in1;
  float c00, c10;
  bool is_mirrored;
};

struct State {
  float first, second;
};

inline State next(Section c, State constant_part, State s, float x) {
  return {s.first + (fma(c.c00, s.first, s.second) + fma(c.in0, x, constant_part.first)),
      s.second + fma(c.c10, s.first, fma(c.in1, x, constant_part.second))};
}

}  // namespace ezmsg_mlx

KERNEL {
  using namespace ezmsg_mlx;
#include "place.inl"
  uint n_sections = zi_shape[0];
  bool is_writer = strip == 0 && is_active;

  // Of two tiles and of two sections in turn, so that one may still be read while the next is written.
  threadgroup uint all_taken[2 * THREADS];
  threadgroup float all_first[2 * THREADS];
  threadgroup float all_second[2 * THREADS];
  uint turn = 0;
  uint turn_of_tile = 0;

  if (is_writer) {
    for (uint i = 0; i < 4 * n_sections; ++i) {
      zf[size_t(i) * n_channels + channel] = zi[size_t(i) * n_channels + channel];
    }
  }

  for (uint start = 0; start < n; start += n_strips * SAMPLES) {
    uint first = start + strip * SAMPLES;
    uint inside = first < n ? min(n - first, SAMPLES) : 0u;
    size_t at = size_t(first) * n_channels + channel;
    float values[SAMPLES];
    uint taken = 0;
    uint n_taken = 0;
#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      values[i] = i < inside ? x[at + size_t(i) * n_channels] : no_sample();
      if (is_taken(values[i])) {
        taken |= 1u << i;
        ++n_taken;
      }
    }
    all_taken[turn_of_tile * THREADS + own] = n_taken;
    // The states are those that another thread wrote, too.
    threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);
    uint n_before = 0;
    uint n_until = 0;
    for (uint i = 0; i < n_strips; ++i) {
      if (i == strip) n_before = n_until;
      n_until += all_taken[turn_of_tile * THREADS + i * lanes + lane];
    }

    for (uint section = 0; section < n_sections; ++section) {
      uint row = section * ROW;
      Section c = {table[row], table[row + 1], table[row + 2], table[row + 3], table[row + 4], table[row + 5] != 0.0f};
      size_t place = size_t(4 * section) * n_channels + channel;
      Pair z0 = {zf[place], zf[place + 2 * n_channels]};
      Pair z1 = {zf[place + n_channels], zf[place + 3 * n_channels]};
      if (c.is_mirrored) z1 = {-z1.high, -z1.low};
      Pair sum = two_sum(z0.high, z1.high);
      sum = moved(sum, z0.low + z1.low);
      // What the state before the tile adds at each sample.
      State constant_part = {
          fma(c.c00, z0.high, sum.high) + fma(c.c00, z0.low, sum.low), fma(c.c10, z0.high, c.c10 * z0.low)};
      float sign_before = c.is_mirrored && (n_before & 1u) ? -1.0f : 1.0f;
      float sign_of_next = c.is_mirrored ? -1.0f : 1.0f;

      State alone = {0.0f, 0.0f};
      float sign = sign_before;
#pragma clang loop unroll(full)
      for (uint i = 0; i < SAMPLES; ++i) {
        if (taken >> i & 1u) {
          alone = next(c, constant_part, alone, sign * values[i]);
          sign *= sign_of_next;
        }
      }
      all_first[turn * THREADS + own] = alone.first;
      all_second[turn * THREADS + own] = alone.second;
      // The states have been read and may be written.
      threadgroup_barrier(mem_flags::mem_threadgroup | mem_flags::mem_device);

      // The difference before this strip and after all.
      State s = {0.0f, 0.0f};
      State after = {0.0f, 0.0f};
      for (uint i = 0; i < n_strips; ++i) {
        if (i == strip) s = after;
        uint power = row + POWERS + 4 * all_taken[turn_of_tile * THREADS + i * lanes + lane];
        uint other = turn * THREADS + i * lanes + lane;
        after = {fma(table[power], after.first, fma(table[power + 1], after.second, all_first[other])),
            fma(table[power + 2], after.first, fma(table[power + 3], after.second, all_second[other]))};
      }

      sign = sign_before;
#pragma clang loop unroll(full)
      for (uint i = 0; i < SAMPLES; ++i) {
        if (taken >> i & 1u) {
          float sample = sign * values[i];
          values[i] = sign * (fma(c.b0, sample, z0.high) + (z0.low + s.first));
          s = next(c, constant_part, s, sample);
          sign *= sign_of_next;
        }
      }

      if (is_writer) {
        z0 = moved(z0, after.first);
        sum = moved(sum, after.second);
        if (c.is_mirrored && (n_until & 1u)) {
          z0 = {-z0.high, -z0.low};
          sum = {-sum.high, -sum.low};
        }
        z1 = two_sum(sum.high, -z0.high);
        z1 = moved(z1, sum.low - z0.low);
        if (c.is_mirrored) z1 = {-z1.high, -z1.low};
        zf[place] = z0.high;
        zf[place + n_channels] = z1.high;
        zf[place + 2 * n_channels] = z0.low;
        zf[place + 3 * n_channels] = z1.low;
      }
      turn = 1 - turn;
    }

#pragma clang loop unroll(full)
    for (uint i = 0; i < SAMPLES; ++i) {
      if (i < inside && is_active) y[at + size_t(i) * n_channels] = values[i];
    }
    turn_of_tile = 1 - turn_of_tile;
  }
}
