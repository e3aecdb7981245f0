#include "ewma.cuh"

KERNEL {
#include "place.inl"

  float samples[SAMPLES];
  constexpr int STRIDE = 1;
  constexpr int UNROLL = SAMPLES;
  constexpr int UNROLL_SOME = SAMPLES;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = from[size_t(i) * n_channels];
  } else {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = i < inside ? from[size_t(i) * n_channels] : no_sample();
  }
#include "ewma_alone.inl"

  __syncthreads();
  float state = float(before.state);
  double weight_before = WEIGHTED ? pair_at(zi + 2 * n_channels, channel, n_channels) : 1.0;
#include "ewma_result.inl"
}
