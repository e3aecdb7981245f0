#pragma once

namespace ezmsg_mlx {

// What a thread reads at once.
struct alignas(16) FourWords {
  unsigned word[4];
};
struct OneWord {
  unsigned word[1];
};
template <int N>
struct WordsOf {
  using Type = OneWord;
};
template <>
struct WordsOf<4> {
  using Type = FourWords;
};

// What a word of weights adds to a product: one float, two of the upper halves of floats (bfloat16), or four bytes of a
// group, each of which is scale * byte + offset.
template <int BITS>
__device__ inline float product_of(unsigned word, const float* x, float scale, float offset) {
  if (BITS == 32) return __int_as_float(int(word)) * x[0];
  if (BITS == 16) return __int_as_float(int(word << 16)) * x[0] + __int_as_float(int(word & 0xffff0000u)) * x[1];
  float bytes = float(word & 255u) * x[0] + float(word >> 8 & 255u) * x[1] + float(word >> 16 & 255u) * x[2] +
                float(word >> 24) * x[3];
  return scale * bytes + offset * (x[0] + x[1] + x[2] + x[3]);
}

// Adds this thread's part of the products of one row of weights in each gate with all rows of x. Rows of one gate
// follow those of another.
template <int BITS, int GATES, int BATCH, int COLUMNS, int HIDDEN, int GROUP, int THREADS>
__device__ inline void add_products(const void* weights, const float* scales, const float* offsets, const float* x,
    int row, int thread, float (&total)[GATES][BATCH]) {
  constexpr int VALUES = 32 / BITS, WORDS = COLUMNS / VALUES, AT_ONCE = WORDS % 4 == 0 ? 4 : 1;
  using Words = typename WordsOf<AT_ONCE>::Type;
  for (int first = thread * AT_ONCE; first < WORDS; first += THREADS * AT_ONCE) {
    Words words[GATES];
    float scale[GATES] = {}, offset[GATES] = {};
    for (int gate = 0; gate < GATES; ++gate) {
      long long of_row = gate * HIDDEN + row;
      words[gate] = *reinterpret_cast<const Words*>(static_cast<const unsigned*>(weights) + of_row * WORDS + first);
      if (BITS == 8) {
        long long group = of_row * (COLUMNS / GROUP) + first * VALUES / GROUP;
        scale[gate] = scales[group];
        offset[gate] = offsets[group];
      }
    }
    for (int b = 0; b < BATCH; ++b) {
      float at[AT_ONCE * VALUES];
      for (int k = 0; k < AT_ONCE * VALUES; ++k) at[k] = x[b * COLUMNS + first * VALUES + k];
      for (int gate = 0; gate < GATES; ++gate) {
        for (int k = 0; k < AT_ONCE; ++k) {
          total[gate][b] += product_of<BITS>(words[gate].word[k], at + k * VALUES, scale[gate], offset[gate]);
        }
      }
    }
  }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// To a few parts in 1e7 of 1.
__device__ inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (expf(2.0f * x) + 1.0f); }

}  // namespace ezmsg_mlx
