#pragma once

// What all kernels share: which samples a thread works on, and float32 pairs.
//
// A threadgroup owns some channels, its lanes, and goes along time tile by tile. Each thread has a strip of consecutive
// samples of one channel; the strips of all threads of a lane make a tile. Groups need nothing of each other.

namespace ezmsg_mlx {

// Larger samples, and what is not finite, come out as they are and leave the state alone.
constant constexpr float LARGEST_SAMPLE = 1e30f;

inline bool is_taken(float sample) { return metal::fabs(sample) <= LARGEST_SAMPLE; }

// Stands for a sample past the end.
inline float no_sample() { return as_type<float>(0x7fc00000u); }

// A value as float32, and what that rounding lost.
struct Pair {
  float high;
  float low;
};

// Knuth, The Art of Computer Programming, vol. 2, 4.2.2. Exact, which needs math_mode "safe".
inline Pair two_sum(float a, float b) {
  float total = a + b;
  float from_b = total - a;
  return {total, (a - (total - from_b)) + (b - from_b)};
}

// The sum of a pair and what is small beside it.
inline Pair moved(Pair value, float change) { return two_sum(value.high, value.low + change); }

}  // namespace ezmsg_mlx
