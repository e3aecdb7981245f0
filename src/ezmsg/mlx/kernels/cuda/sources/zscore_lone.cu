#include "zscore.cuh"

KERNEL {
#include "place.inl"

  float samples[SAMPLES];
  constexpr int STRIDE = 1;
  constexpr int UNROLL = SAMPLES;
  if (inside == SAMPLES) {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = from[size_t(i) * n_channels];
  } else {
    #pragma unroll
    for (int i = 0; i < SAMPLES; ++i) samples[i] = i < inside ? from[size_t(i) * n_channels] : no_sample();
  }
#include "zscore_alone.inl"

  Moments before = moments_before(zi, channel, n_channels);
#include "zscore_result.inl"
}
