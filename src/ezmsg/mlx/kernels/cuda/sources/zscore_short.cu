#include "zscore.cuh"

KERNEL {
#include "indices.inl"
#include "load_short.inl"

  constexpr int UNROLL = SAMPLES;
#include "zscore_local.inl"

  Moments before = moments_before(zi, channel, n_channels);
#include "zscore_result.inl"
}
