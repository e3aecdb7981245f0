#include "copies.cuh"
#include "ewma.cuh"
#include "lookback.cuh"

KERNEL {
#include "indices.inl"
#include "load_long.inl"

  constexpr int UNROLL = 8;
  constexpr int UNROLL_SOME = 1;
#include "ewma_local.inl"

  __syncthreads();
  // What is left of a state after a tile of which some samples were taken.
  auto decay_of = [&](int finite) {
    return finite == TILE ? double(table[2]) + double(table[3]) : power(1.0 - alpha, finite);
  };
  // The state and, if it counts, the weight.
  constexpr int SIZE = 1 + WEIGHTED;
  double linked[SIZE] = {};
  int of_tile = 0;
  if (thread == 0) {
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(all_decays[i][lane], total, all_local[i][lane]);
      of_tile += all_finite[i][lane];
    }
    linked[SIZE - 1] = 1.0 - decay_of(of_tile);
    linked[0] = double(total);
  }
  double after[SIZE];
  link<SIZE, THREADS, TILE>(
      published, tile, channel, n_channels, of_tile, linked, after,
      [&](double* of_channel) {
        if (WEIGHTED) of_channel[SIZE - 1] = pair_at(zi + 2 * n_channels, channel, n_channels);
        of_channel[0] = before.state;
      },
      [&](const double* of_tile, int finite, double* of_channel) {
        double decay = decay_of(finite);
        #pragma unroll
        for (int i = 0; i < SIZE; ++i) of_channel[i] = fma(decay, of_channel[i], of_tile[i]);
      },
      [&] {
        double decay = decay_of(TILE);
        return [decay](const double* of_tile, double* of_channel) {
          #pragma unroll
          for (int i = 0; i < SIZE; ++i) of_channel[i] = fma(decay, of_channel[i], of_tile[i]);
        };
      });
  float state = float(linked[0]);
  double weight_before = WEIGHTED ? linked[SIZE - 1] : 1.0;
#include "ewma_result.inl"
}
