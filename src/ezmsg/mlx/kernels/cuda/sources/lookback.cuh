#pragma once

namespace {

// What a tile publishes of itself and a channel: its states, then how many of its samples were taken, if these are not
// all. Two of these travel in a word of 16 bytes, since what tiles receive of each other goes through the same cache as
// the samples. A look reads all words at once, so that it waits for memory once. Half of a word may come without the
// other, but each half comes whole, so that each has a tag in its lowest two bits, zero before anything was published.
// A state loses up to 2^-50 of itself to that.
constexpr unsigned LOCAL = 1;  // what the tile makes of states of zero, if all of its samples were taken
constexpr unsigned SOME = 2;   // the same, if not
constexpr unsigned AFTER = 3;  // the states after it
constexpr unsigned NAP_NS = 20;

template <int SIZE>
constexpr int WORDS = SIZE / 2 + 1;

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

__device__ void set_word(ulonglong2* at, unsigned long long x, unsigned long long y) {
#ifdef __CUDA_ARCH__
  asm volatile("st.relaxed.gpu.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(x), "l"(y) : "memory");
#else
  __stwt(at, ulonglong2{x, y});
#endif
}

__device__ unsigned tag_of(unsigned long long half) { return unsigned(half) & 3; }

// A state as it is published. The tile itself goes on from this, too: all compute the states after it in the same
// steps.
__device__ double trimmed(double state) { return __longlong_as_double(__double_as_longlong(state) & ~3ll); }

template <int SIZE>
__device__ void publish(
    const int64_t* published, size_t at, unsigned n_channels, const double* states, unsigned tag, int taken) {
  auto word = reinterpret_cast<ulonglong2*>(const_cast<int64_t*>(published)) + at;
  unsigned long long halves[SIZE + 2];
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) halves[i] = (unsigned long long)(__double_as_longlong(trimmed(states[i]))) | tag;
  halves[SIZE] = halves[SIZE + 1] = (unsigned long long)(taken) << 2 | tag;
  #pragma unroll
  for (int i = 0; i < WORDS<SIZE>; ++i) {
    if (2 * i < SIZE || tag == SOME) set_word(word + size_t(i) * n_channels, halves[2 * i], halves[2 * i + 1]);
  }
}

// Waits until something was published, or with *is_after* until the states after the tile were. Returns how many
// samples were taken, or -1 with the states after the tile.
template <int SIZE, int TILE>
__device__ int receive(const int64_t* published, size_t at, unsigned n_channels, bool is_after, double* states) {
  auto word = reinterpret_cast<const ulonglong2*>(published) + at;
  while (true) {
    unsigned long long halves[SIZE + 2];
    #pragma unroll
    for (int i = 0; 2 * i < SIZE; ++i) {
      ulonglong2 received = word_at(word + size_t(i) * n_channels);
      halves[2 * i] = received.x;
      halves[2 * i + 1] = received.y;
    }
    unsigned tag = tag_of(halves[0]);
    bool is_whole = is_after ? tag == AFTER : tag != 0;
    #pragma unroll
    for (int i = 1; i < SIZE + SIZE % 2; ++i) is_whole = is_whole && tag_of(halves[i]) == tag;
    if (SIZE % 2 == 0 && is_whole && tag == SOME) {
      halves[SIZE] = word_at(word + size_t(SIZE / 2) * n_channels).x;
      is_whole = tag_of(halves[SIZE]) == tag;
    }
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) states[i] = trimmed(__longlong_as_double((long long)(halves[i])));
    if (is_whole) return tag == AFTER ? -1 : tag == LOCAL ? TILE : int(halves[SIZE] >> 2);
    __nanosleep(NAP_NS);
  }
}

// Gives *state*, the state before the tile, to all threads of a channel, and *after*, the state after it, to the first.
// That thread brings in *state* what the *taken* samples of the tile make of a state of zero. *before(state)* gives the
// state before the message. *over_some(local, taken, state)* takes a state over a tile, and what *over_all()* returns
// does the same, called with *local* and *state*, over one of which all samples were taken.
//
// Each thread listens to one of the tiles before. The farthest is the first of which the state after it will be known,
// so that the last thread waits for that; what the nearer ones have published by then is enough. The result does not
// depend on which tiles were quick, since all compute it in the same steps.
template <int SIZE, int THREADS, int TILE, typename Before, typename OverSome, typename OverAll>
__device__ void link(const int64_t* published, unsigned tile, unsigned channel, unsigned n_channels, int taken,
    double* state, double* after, Before before, OverSome over_some, OverAll over_all) {
  // A row for each of the tiles before, the farthest first, with a count of -1 where the states after it are known; and
  // one for the tile itself. In the end the first row is the state before the tile.
  __shared__ double received[THREADS + 1][SIZE][32];
  __shared__ int counts[THREADS][32];
  size_t of_tile = size_t(WORDS<SIZE>) * n_channels;
  unsigned thread = threadIdx.y;
  unsigned lane = threadIdx.x;
  unsigned row = THREADS - 1 - thread;
  if (thread == 0) {
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) received[THREADS][i][lane] = trimmed(state[i]);
    if (tile)
      publish<SIZE>(published, tile * of_tile + channel, n_channels, state, taken == TILE ? LOCAL : SOME, taken);
  }
  int count = -1;
  if (thread < tile) {
    count = receive<SIZE, TILE>(published, (tile - 1 - thread) * of_tile + channel, n_channels, row == 0, state);
  } else {
    before(state);
  }
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) received[row][i][lane] = state[i];
  counts[row][lane] = count;
  bool all = __syncthreads_and((count == TILE || count < 0) && (thread || taken == TILE));
  if (thread == 0) {
    double local[SIZE];
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) after[i] = received[0][i][lane];
    // The same steps either way; the usual one has them unrolled, with what takes a state over a tile in registers.
    if (all) {
      auto over = over_all();
      #pragma unroll
      for (int k = 1; k <= THREADS; ++k) {
        bool is_after = k < THREADS && counts[k][lane] < 0;
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) {
          local[i] = received[k][i][lane];
          if (k == THREADS) received[0][i][lane] = after[i];
        }
        over(local, after);
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) after[i] = is_after ? local[i] : trimmed(after[i]);
      }
    } else {
      #pragma unroll 1
      for (int k = 1; k <= THREADS; ++k) {
        count = k < THREADS ? counts[k][lane] : taken;
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) {
          local[i] = received[k][i][lane];
          if (k == THREADS) received[0][i][lane] = after[i];
        }
        if (count >= 0) over_some(local, count, after);
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) after[i] = count < 0 ? local[i] : trimmed(after[i]);
      }
    }
    publish<SIZE>(published, tile * of_tile + channel, n_channels, after, AFTER, 0);
  }
  __syncthreads();
  #pragma unroll
  for (int i = 0; i < SIZE; ++i) state[i] = received[0][i][lane];
}

}  // namespace
