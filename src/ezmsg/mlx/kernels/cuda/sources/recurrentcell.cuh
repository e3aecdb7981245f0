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

// Weights, of which each is read once in a launch, and so need not stay in a cache.
__device__ inline FourWords once(const FourWords* at) {
#ifdef __CUDA_ARCH__
  uint4 four = __ldcs(reinterpret_cast<const uint4*>(at));
  return {four.x, four.y, four.z, four.w};
#else
  return *at;
#endif
}
__device__ inline OneWord once(const OneWord* at) { return *at; }

// float32, or bfloat16; or bytes in groups with a scale and an offset.
struct Matrix {
  const void* values;
  const float* scales;
  const float* offsets;
};

struct Layer {
  Matrix input, hidden;
  const float* bias;
  const float* bhn;
  const float* h;
  float* h_after;
  // Of an LSTM.
  const float* c;
  float* c_after;
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

// Adds this thread's part of the products of some rows of weights with all rows of x. The rows are *apart* from each
// other. The last of them adds to sum number LAST, the others to the sums of their own number.
template <int BITS, int ROWS, int LAST, int BATCH, int COLUMNS, int GROUP, int TEAM>
__device__ inline void add_products(
    const Matrix& weights, const float* x, int row, int apart, int member, float (&total)[4][BATCH]) {
  constexpr int VALUES = 32 / BITS, WORDS = COLUMNS / VALUES, AT_ONCE = WORDS % 4 == 0 ? 4 : 1;
  using Words = typename WordsOf<AT_ONCE>::Type;
  const unsigned* values = static_cast<const unsigned*>(weights.values);
  #pragma unroll 2
  for (int first = member * AT_ONCE; first < WORDS; first += TEAM * AT_ONCE) {
    Words words[ROWS];
    float scale[ROWS] = {}, offset[ROWS] = {};
    #pragma unroll
    for (int k = 0; k < ROWS; ++k) {
      long long of_row = k * apart + row;
      words[k] = once(reinterpret_cast<const Words*>(values + of_row * WORDS + first));
      if (BITS == 8) {
        long long group = of_row * (COLUMNS / GROUP) + first * VALUES / GROUP;
        scale[k] = weights.scales[group];
        offset[k] = weights.offsets[group];
      }
    }
    #pragma unroll
    for (int b = 0; b < BATCH; ++b) {
      float at[AT_ONCE * VALUES];
      #pragma unroll
      for (int i = 0; i < AT_ONCE * VALUES; ++i) at[i] = x[b * COLUMNS + first * VALUES + i];
      #pragma unroll
      for (int k = 0; k < ROWS; ++k) {
        #pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
          total[k == ROWS - 1 ? LAST : k][b] +=
              product_of<BITS>(words[k].word[i], at + i * VALUES, scale[k], offset[k]);
        }
      }
    }
  }
}

// Has the beginning of such rows brought near, without waiting for it.
template <int BITS, int ROWS, int COLUMNS, int TEAM>
__device__ inline void begin_rows(const Matrix& weights, int row, int apart, int member) {
#ifdef __CUDA_ARCH__
  constexpr int LINE = 128, MOST = 6144, ALL = COLUMNS / (32 / BITS) * 4, BYTES = ALL < MOST ? ALL : MOST;
  for (int k = 0; k < ROWS; ++k) {
    const char* start = static_cast<const char*>(weights.values) + (k * apart + row) * (long long)(ALL);
    for (int at = member * LINE; at < BYTES; at += TEAM * LINE) {
      asm volatile("prefetch.global.L2 [%0];" ::"l"(start + at) : "memory");
    }
  }
#endif
}

// The sums of all threads of a team, for its first. *sums* has room for four floats of each thread of the block, whose
// threads all come here.
template <int BATCH, int THREADS, int TEAM>
__device__ inline void add_up(float* sums, int thread, const float (&total)[4][BATCH], int b) {
  for (int k = 0; k < 4; ++k) sums[k * THREADS + thread] = total[k][b];
  __syncthreads();
  for (int half = TEAM / 2; half > 0; half /= 2) {
    if (thread % TEAM < half) {
      for (int k = 0; k < 4; ++k) sums[k * THREADS + thread] += sums[k * THREADS + thread + half];
    }
    __syncthreads();
  }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// To a few parts in 1e7 of 1.
__device__ inline float hyperbolic_tangent(float x) { return 1.0f - 2.0f / (expf(2.0f * x) + 1.0f); }

// Counts of a stack, each in a line of its own: the next tile, whether a sample is not finite, and for each stage how
// many of its tiles are done.
constexpr int COUNTS_APART = 32, NEXT_TILE = 0, NOT_FINITE = 1, DONE = 2;

__device__ inline unsigned* count_of(const unsigned* counts, int number) {
  return const_cast<unsigned*>(counts) + number * COUNTS_APART;
}

// Of all threads of a block: what they have written is seen by those that wait for the stage.
__device__ inline void arrive(const unsigned* counts, int stage) {
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    atomicAdd(count_of(counts, DONE + stage), 1u);
  }
}

// Of all threads of a block, until *n_tiles* of the stage are done. These have begun before this block, and wait for no
// later one.
__device__ inline void wait_for(const unsigned* counts, int stage, unsigned n_tiles) {
  if (threadIdx.x == 0) {
    const unsigned* at = count_of(counts, DONE + stage);
    while (true) {
      unsigned n_done;
#ifdef __CUDA_ARCH__
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n_done) : "l"(at) : "memory");
#else
      n_done = *at;
#endif
      if (n_done >= n_tiles) break;
      __nanosleep(20);
    }
  }
  __syncthreads();
}

// Computes UNITS hidden units of a layer, from *first* on. *input* gives the samples, after it has waited for them, and
// *is_kept* says then whether the state stays as it is. *results*, if there is one, is for the next layer.
template <int BITS, bool IS_LSTM, int BATCH, int COLUMNS, int HIDDEN, int GROUP, int THREADS, int UNITS, typename Input,
    typename IsKept>
__device__ inline void run_units(
    const Layer& layer, int first, float* sums, float* results, Input input, IsKept is_kept) {
  constexpr int TEAM = THREADS / UNITS, GATES = IS_LSTM ? 4 : 3;
  const int thread = threadIdx.x, member = thread % TEAM, unit = first + thread / TEAM;
  const bool is_there = unit < HIDDEN;
  float total[4][BATCH] = {};
  if (is_there) {
    begin_rows<BITS, GATES, COLUMNS, TEAM>(layer.input, unit, HIDDEN, member);
    // Of a GRU, the product with the state is apart in the last gate, since the reset gate is on it alone.
    add_products<BITS, GATES, 3, BATCH, HIDDEN, GROUP, TEAM>(layer.hidden, layer.h, unit, HIDDEN, member, total);
  }
  const float* x = input();
  if (is_there) {
    add_products<BITS, GATES, GATES - 1, BATCH, COLUMNS, GROUP, TEAM>(layer.input, x, unit, HIDDEN, member, total);
  }
  for (int b = 0; b < BATCH; ++b) {
    add_up<BATCH, THREADS, TEAM>(sums, thread, total, b);
    if (is_there && member == 0) {
      const int at = b * HIDDEN + unit;
      const float* bias = layer.bias + unit;
      float sum[4];
      for (int k = 0; k < 4; ++k) sum[k] = sums[k * THREADS + thread];
      float before = layer.h[at], after;
      const bool keeps = is_kept();
      if (IS_LSTM) {
        float cell = sigmoid(sum[1] + bias[HIDDEN]) * layer.c[at] +
                     sigmoid(sum[0] + bias[0]) * hyperbolic_tangent(sum[2] + bias[2 * HIDDEN]);
        after = sigmoid(sum[3] + bias[3 * HIDDEN]) * hyperbolic_tangent(cell);
        layer.c_after[at] = keeps ? layer.c[at] : cell;
      } else {
        float reset = sigmoid(sum[0] + bias[0]), update = sigmoid(sum[1] + bias[HIDDEN]);
        float candidate = hyperbolic_tangent(sum[2] + bias[2 * HIDDEN] + reset * (sum[3] + layer.bhn[unit]));
        after = (1.0f - update) * candidate + update * before;
      }
      layer.h_after[at] = keeps ? before : after;
      if (results) results[at] = after;
    }
    // Until all sums of this row have been read.
    __syncthreads();
  }
}

}  // namespace ezmsg_mlx
