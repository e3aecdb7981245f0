"""How the kernels for CUDA link the tiles of a long message in one launch: decoupled look-back.

Each block takes a tile of samples and 32 channels, computes what the tile makes of a state of zero, and tells it at
once. Then it looks back for the nearest tile of which the state after it is known, goes forward from there over what
the tiles between have told, and tells the state after its own. So each sample is read and written once. Blocks start
in the order of their index, so that the tiles that one waits for are running.

D. Merrill, M. Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", NVIDIA NVR-2016-002.
"""

from __future__ import annotations

import functools

import mlx.core as mx

LOOK_BACK = r"""
namespace {

// What a tile has told of a state: its value, and a tag, zero before anything was told. The lowest two bits of a tag
// say whether the value is what the tile makes of a state of zero, or the state after it; above them is the number of
// samples that the state goes over. Such a word of 16 bytes is written and read at once, as CUB does it, so that nobody
// takes a value with the tag of another.
constexpr unsigned ALONE = 1;
constexpr unsigned AFTER = 2;
constexpr unsigned NAP_NS = 20;

// Relaxed and for this GPU alone: what is for the whole system takes longer.
__device__ ulonglong2 word_at(const ulonglong2* at) {
#ifdef __CUDA_ARCH__
  ulonglong2 word;
  asm volatile("ld.relaxed.gpu.global.v2.u64 {%0, %1}, [%2];" : "=l"(word.x), "=l"(word.y) : "l"(at) : "memory");
  return word;
#else
  return __ldcv(at);
#endif
}

__device__ void set_word(ulonglong2* at, double value, unsigned long long tag) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(__double_as_longlong(value)), "l"(tag)
               : "memory");
#else
  *at = {(unsigned long long)(__double_as_longlong(value)), tag};
#endif
}

template <int SIZE>
__device__ void tell(const int64_t* told, size_t at, unsigned n_channels, const double* values, unsigned tag) {
  auto word = reinterpret_cast<ulonglong2*>(const_cast<int64_t*>(told)) + at;
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) set_word(word + size_t(i) * n_channels, values[i], tag);
}

// Waits until something was told of a kind that is *wanted*, and returns its tag. Looks at one word while it waits, so
// as to leave the memory to the others.
template <int SIZE>
__device__ unsigned hear(const int64_t* told, size_t at, unsigned n_channels, unsigned wanted, double* values) {
  auto word = reinterpret_cast<const ulonglong2*>(told) + at;
  while (true) {
    ulonglong2 heard[SIZE];
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) heard[i] = word_at(word + size_t(i) * n_channels);
    bool is_whole = (heard[0].y & wanted) != 0;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) {
      is_whole = is_whole && heard[i].y == heard[0].y;
      values[i] = __longlong_as_double((long long)(heard[i].x));
    }
    if (is_whole) return unsigned(heard[0].y);
    while (!(word_at(word).y & wanted)) __nanosleep(NAP_NS);
  }
}

// Gives *start*, the state before the tile, and to the first thread of each channel *after*, the state after it. That
// thread brings *alone*, what the *taken* samples of the tile make of a state of zero. *before(state)* gives the state
// before the message; *go_over(alone, taken, begin, end, state)* takes a state over some tiles.
//
// Each thread listens to one of the tiles before. The farthest is the first of which the state after it will be known,
// so that the last thread waits for that; what the nearer ones have told by then is enough. The result does not depend
// on which tiles were quick, since all compute it in the same steps.
template <int SIZE, int THREADS, typename Before, typename GoOver>
__device__ void link(
    const int64_t* told, unsigned tile, unsigned channel, unsigned n_channels, int taken, const double* alone,
    double (*start)[32], double* after, Before before, GoOver go_over) {
  // A row for each of the tiles before, the farthest first, and one for the tile itself.
  __shared__ double heard[THREADS + 1][SIZE][32];
  __shared__ int counts[THREADS + 1][32];
  __shared__ bool is_after[THREADS][32];
  size_t of_tile = size_t(SIZE) * n_channels;
  unsigned thread = threadIdx.y;
  unsigned lane = threadIdx.x;
  unsigned row = THREADS - 1 - thread;
  if (thread == 0) {
    counts[THREADS][lane] = taken;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) heard[THREADS][i][lane] = alone[i];
    if (tile) tell<SIZE>(told, tile * of_tile + channel, n_channels, alone, unsigned(taken) << 2 | ALONE);
  }
  double values[SIZE];
  unsigned tag = AFTER;
  if (thread < tile) {
    unsigned wanted = row ? ALONE | AFTER : AFTER;
    tag = hear<SIZE>(told, (tile - 1 - thread) * of_tile + channel, n_channels, wanted, values);
  } else {
    before(values);
  }
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) heard[row][i][lane] = values[i];
  counts[row][lane] = int(tag >> 2);
  is_after[row][lane] = tag & AFTER;
  __syncthreads();
  if (thread == 0) {
    int known = THREADS - 1;
    while (!is_after[known][lane]) --known;
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) after[i] = heard[known][i][lane];
    // Over the tiles between, then over the tile itself.
    #pragma unroll 1
    for (int end = THREADS; end <= THREADS + 1; ++end) {
      go_over(heard, counts, end == THREADS ? known + 1 : THREADS, end, after);
      #pragma unroll
      for (int i = 0; i < SIZE; ++i) {
        if (end == THREADS) start[i][lane] = after[i];
      }
    }
    tell<SIZE>(told, tile * of_tile + channel, n_channels, after, AFTER);
  }
  __syncthreads();
}

}  // namespace
"""


_WORDS_A_BLOCK = 256


@functools.cache
def _zeros():  # noqa: ANN202 - an opaque callable of MLX
    return mx.fast.cuda_kernel(
        name="ezmsg_mlx_nothing_told",
        input_names=[],
        output_names=["told"],
        source=f"reinterpret_cast<ulonglong2*>(told)[blockIdx.x * size_t({_WORDS_A_BLOCK}) + threadIdx.x] = {{0, 0}};",
    )


def nothing_told(n_tiles: int, n_states: int, n_channels: int) -> mx.array:
    """Room for what each tile tells of its *n_states* states of each channel, with nothing told.

    Zeros, in memory of its own, since the kernel writes to it: `mx.compile` makes one array of two `mx.zeros` of the
    same shape, and none of what two calls of a kernel give.
    """
    n_blocks = -(-n_tiles * n_states * n_channels // _WORDS_A_BLOCK)
    (told,) = _zeros()(
        inputs=[],
        output_shapes=[(n_blocks * _WORDS_A_BLOCK, 2)],
        output_dtypes=[mx.int64],
        grid=(n_blocks * _WORDS_A_BLOCK, 1, 1),
        threadgroup=(_WORDS_A_BLOCK, 1, 1),
    )
    return told
