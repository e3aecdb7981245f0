#include "copies.cuh"
#include "lookback.cuh"
#include "sections.cuh"

namespace {

// The sections of a message, and their transition over the samples of a thread, and over those of a tile. In shared
// memory and volatile: in registers they would take a thread from 60 to 70 of these.
template <int SECTIONS>
struct Shared {
  volatile double rows[SECTIONS][5];
  volatile double over[2][2 * SECTIONS][2 * SECTIONS];

  __device__ void sections(Section* result) const {
    #pragma unroll
    for (int i = 0; i < SECTIONS; ++i) result[i] = {rows[i][0], rows[i][1], rows[i][2], rows[i][3], rows[i][4]};
  }
};

template <int SECTIONS>
__device__ float cascade(const Section* sections, double value, double* z) {
  #pragma unroll
  for (int i = 0; i < SECTIONS; ++i) step(sections[i], value, z[2 * i], z[2 * i + 1]);
  return float(value);
}

// What *inside* samples make of the state *z*; they are in shared memory, *stride* apart. Returns how many were
// filtered. *all* is whether SAMPLES are inside, and becomes whether all of them were filtered.
template <int SECTIONS, int SAMPLES>
__device__ int run_local(
    const Shared<SECTIONS>& shared, bool& all, int inside, const float* samples, int stride, double* z) {
  Section sections[SECTIONS];
  shared.sections(sections);
  if (all) {
    #pragma unroll 4
    for (int i = 0; i < SAMPLES; ++i) {
      float value = samples[i * stride];
      all = all & is_taken(value);
      cascade<SECTIONS>(sections, value, z);
    }
    if (all) return SAMPLES;
    #pragma unroll
    for (int i = 0; i < 2 * SECTIONS; ++i) z[i] = 0.0;
  }
  int taken = 0;
  #pragma unroll 1
  for (int i = 0; i < inside; ++i) {
    float value = samples[i * stride];
    if (is_taken(value)) {
      ++taken;
      cascade<SECTIONS>(sections, value, z);
    }
  }
  return taken;
}

// The same with results, *step* apart from *to* on. *all* is whether all samples are to be filtered.
template <int SECTIONS, int SAMPLES>
__device__ void run_all(const Shared<SECTIONS>& shared, bool all, int inside, const float* samples, int stride,
    float* to, unsigned step, double* z) {
  Section sections[SECTIONS];
  shared.sections(sections);
  if (all) {
    #pragma unroll 4
    for (int i = 0; i < SAMPLES; ++i) to[size_t(i) * step] = cascade<SECTIONS>(sections, samples[i * stride], z);
  } else {
    #pragma unroll 1
    for (int i = 0; i < inside; ++i) {
      float value = samples[i * stride];
      to[size_t(i) * step] = is_taken(value) ? cascade<SECTIONS>(sections, value, z) : value;
    }
  }
}

// The transition over a part of which all samples are filtered, in registers. No section knows of the ones behind it.
template <int SECTIONS>
struct Over {
  double of[2 * SECTIONS][2 * SECTIONS];

  __device__ explicit Over(const volatile double (*transition)[2 * SECTIONS]) {
    #pragma unroll
    for (int i = 0; i < 2 * SECTIONS; ++i) {
      #pragma unroll
      for (int k = 0; k <= (i | 1); ++k) of[i][k] = transition[i][k];
    }
  }

  __device__ void operator()(const double* local, double* z) const {
    double next[2 * SECTIONS];
    #pragma unroll
    for (int i = 0; i < 2 * SECTIONS; ++i) {
      next[i] = local[i];
      #pragma unroll
      for (int k = 0; k <= (i | 1); ++k) next[i] = fma(of[i][k], z[k], next[i]);
    }
    #pragma unroll
    for (int i = 0; i < 2 * SECTIONS; ++i) z[i] = next[i];
  }
};

// The state *z* goes over a part of *n_samples*, of which *taken* were filtered. *local* is what they make of a state
// of zero, and *transition* is that over all.
template <int SECTIONS>
__device__ void over_some(const Shared<SECTIONS>& shared, const volatile double (*transition)[2 * SECTIONS],
    int n_samples, const double* local, int taken, double* z) {
  if (taken == n_samples) {
    Over<SECTIONS> over(transition);
    over(local, z);
    return;
  }
  #pragma unroll 1
  for (int k = 0; k < taken; ++k) {
    Section sections[SECTIONS];
    shared.sections(sections);
    cascade<SECTIONS>(sections, 0.0, z);
  }
  #pragma unroll
  for (int k = 0; k < 2 * SECTIONS; ++k) z[k] += local[k];
}

// The state *z* goes over the parts of the first *n_threads* threads.
template <int SECTIONS, int THREADS, int SAMPLES>
__device__ void over_threads(const Shared<SECTIONS>& shared, bool all, const double (*all_local)[2 * SECTIONS][32],
    const int (*all_taken)[32], int n_threads, double* z) {
  int lane = threadIdx.x;
  if (all) {
    Over<SECTIONS> over(shared.over[0]);
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      if (i < n_threads) {
        double local[2 * SECTIONS];
        #pragma unroll
        for (int k = 0; k < 2 * SECTIONS; ++k) local[k] = all_local[i][k][lane];
        over(local, z);
      }
    }
    return;
  }
  #pragma unroll 1
  for (int i = 0; i < n_threads; ++i) {
    double local[2 * SECTIONS];
    #pragma unroll
    for (int k = 0; k < 2 * SECTIONS; ++k) local[k] = all_local[i][k][lane];
    over_some<SECTIONS>(shared, shared.over[0], SAMPLES, local, all_taken[i][lane], z);
  }
}

}  // namespace

KERNEL {
#include "indices.inl"

  constexpr int SIZE = 2 * SECTIONS;
  constexpr int STRIDE = THREADS * LANES;
  __shared__ float samples_of_all[SAMPLES * STRIDE];
  float* samples = samples_of_all + thread * LANES + lane;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) begin_copy(samples + i * STRIDE, from + size_t(i) * n_channels);
  } else {
    #pragma unroll 1
    for (int i = 0; i < inside; ++i) begin_copy(samples + i * STRIDE, from + size_t(i) * n_channels);
  }
  size_t n_words = size_t((n - 1) / TILE + 1) * WORDS<SIZE> * n_channels;
  __shared__ Shared<SECTIONS> shared;
  __shared__ double all_z[THREADS][SIZE][LANES];
  __shared__ int all_taken[THREADS][LANES];
  #pragma unroll 1
  for (int pass = 0; pass < PASSES; ++pass) {
    const double* of_pass = doubles(table) + pass * (SECTIONS * ROW + 2 * SIZE * SIZE);
    for (int i = thread * LANES + lane; i < 5 * SECTIONS; i += THREADS * LANES) {
      shared.rows[i / 5][i % 5] = of_pass[i / 5 * ROW + i % 5];
    }
    for (int i = thread * LANES + lane; i < 2 * SIZE * SIZE; i += THREADS * LANES) {
      (&shared.over[0][0][0])[i] = of_pass[SECTIONS * ROW + i];
    }
    if (pass == 0) end_copies();
    __syncthreads();

    bool all = inside == SAMPLES;
    double z[SIZE] = {};
    all_taken[thread][lane] = run_local<SECTIONS, SAMPLES>(shared, all, inside, samples, STRIDE, z);
    #pragma unroll
    for (int i = 0; i < SIZE; ++i) all_z[thread][i][lane] = z[i];
    bool all_of_block = __syncthreads_and(all);

    double state[SIZE] = {};
    int of_tile = 0;
    if (thread == 0) {
      over_threads<SECTIONS, THREADS, SAMPLES>(shared, all_of_block, all_z, all_taken, THREADS, state);
      #pragma unroll
      for (int i = 0; i < THREADS; ++i) of_tile += all_taken[i][lane];
    }
    double after[SIZE];
    link<SIZE, THREADS, TILE>(
        published + 2 * pass * n_words, tile, channel, n_channels, of_tile, state, after,
        [&](double* state) {
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) state[i] = state_at(zi, pass * SIZE + i, channel, n_channels);
        },
        [&](const double* local, int taken, double* state) {
          over_some<SECTIONS>(shared, shared.over[1], TILE, local, taken, state);
        },
        [&] { return Over<SECTIONS>(shared.over[1]); });
    if (thread == 0 && active && tile == (n - 1) / TILE) {
      #pragma unroll
      for (int i = 0; i < SIZE; ++i) set_state(zf, pass * SIZE + i, channel, n_channels, after[i]);
    }

    over_threads<SECTIONS, THREADS - 1, SAMPLES>(shared, all_of_block, all_z, all_taken, thread, state);
    if (pass + 1 < PASSES) {
      // Beyond the last channel, too: what is published of that one has to be the same each time.
      run_all<SECTIONS, SAMPLES>(shared, all, inside, samples, STRIDE, samples, STRIDE, state);
      __syncthreads();
    } else if (active) {
      run_all<SECTIONS, SAMPLES>(shared, all, inside, samples, STRIDE, to, n_channels, state);
    }
  }
}
