#include "ewma.cuh"

KERNEL {
#include "indices.inl"
#include "load_short.inl"

  constexpr int UNROLL = SAMPLES;
  constexpr int UNROLL_SOME = SAMPLES;
#include "ewma_local.inl"

  __syncthreads();
  float state = float(before.state);
  double weight_before = WEIGHTED ? pair_at(zi + 2 * n_channels, channel, n_channels) : 1.0;
#include "ewma_result.inl"
}
