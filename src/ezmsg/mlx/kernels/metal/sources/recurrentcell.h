#pragma once

namespace ezmsg_mlx {

// What a word of weights adds to a product: one float, two of the upper halves of floats (bfloat16), or four bytes of a
// group, each of which is scale * byte + offset.
template <uint BITS>
inline float product_of(uint word, thread const float* x, float scale, float offset) {
  if (BITS == 32) return as_type<float>(word) * x[0];
  if (BITS == 16) return as_type<float>(word << 16) * x[0] + as_type<float>(word & 0xffff0000u) * x[1];
  float bytes = float(word & 255u) * x[0] + float(word >> 8 & 255u) * x[1] + float(word >> 16 & 255u) * x[2] +
                float(word >> 24) * x[3];
  return scale * bytes + offset * (x[0] + x[1] + x[2] + x[3]);
}

// Adds this thread's part of the products of one row of weights in each gate with all rows of x. Rows of one gate
// follow those of another.
template <uint BITS, uint GATES, uint BATCH, uint COLUMNS, uint HIDDEN, uint GROUP, uint THREADS>
inline void add_products(const device uint* weights, const device float* scales, const device float* offsets,
    const device float* x, uint row, uint index, thread float* total) {
  constexpr uint VALUES = 32 / BITS;
  constexpr uint WORDS = COLUMNS / VALUES;
  for (uint word = index; word < WORDS; word += THREADS) {
    uint words[GATES];
    float scale[GATES];
    float offset[GATES];
    for (uint gate = 0; gate < GATES; ++gate) {
      uint of_row = gate * HIDDEN + row;
      words[gate] = weights[of_row * WORDS + word];
      scale[gate] = 0.0f;
      offset[gate] = 0.0f;
      if (BITS == 8) {
        uint group = of_row * (COLUMNS / GROUP) + word * VALUES / GROUP;
        scale[gate] = scales[group];
        offset[gate] = offsets[group];
      }
    }
    for (uint b = 0; b < BATCH; ++b) {
      float at[VALUES];
      for (uint k = 0; k < VALUES; ++k) at[k] = x[b * COLUMNS + word * VALUES + k];
      for (uint gate = 0; gate < GATES; ++gate) {
        total[gate * BATCH + b] += product_of<BITS>(words[gate], at, scale[gate], offset[gate]);
      }
    }
  }
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

// To a few parts in 1e7 of 1.
inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace ezmsg_mlx
