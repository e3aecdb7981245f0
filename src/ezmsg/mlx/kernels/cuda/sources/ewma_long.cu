#include "copies.cuh"
#include "ewma.cuh"
#include "lookback.cuh"

KERNEL {
#include "place.inl"

  constexpr int STRIDE = THREADS * LANES;
  constexpr int UNROLL = 8;
  constexpr int UNROLL_SOME = 1;
  __shared__ float samples_of_all[SAMPLES * STRIDE];
  float* samples = samples_of_all + thread * LANES + lane;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) begin_copy(samples + i * STRIDE, from + size_t(i) * n_channels);
    end_copies();
  } else {
    #pragma unroll 1
    for (int i = 0; i < SAMPLES; ++i) samples[i * STRIDE] = i < inside ? from[size_t(i) * n_channels] : no_sample();
  }
#include "ewma_alone.inl"

  __shared__ int all_finite[THREADS][LANES];
  all_finite[thread][lane] = n_finite;
  __syncthreads();
  double linked = 0.0;
  int of_tile = 0;
  if (thread == 0) {
    float total = 0.0f;
    #pragma unroll
    for (int i = 0; i < THREADS; ++i) {
      total = fmaf(all_decays[i][lane], total, all_alone[i][lane]);
      of_tile += all_finite[i][lane];
    }
    linked = double(total);
  }
  double after;
  link<1, THREADS, TILE>(
      told, tile, channel, n_channels, of_tile, &linked, &after,
      [&](double* of_channel) { *of_channel = before.state; },
      [&](const double* of_tile, int finite, double* of_channel) {
        double decay = finite == TILE ? double(table[2]) + double(table[3]) : power(1.0 - alpha, finite);
        *of_channel = fma(decay, *of_channel, *of_tile);
      },
      [&] {
        double decay = double(table[2]) + double(table[3]);
        return [decay](const double* of_tile, double* of_channel) { *of_channel = fma(decay, *of_channel, *of_tile); };
      });
  float state = float(linked);
#include "ewma_result.inl"
}
