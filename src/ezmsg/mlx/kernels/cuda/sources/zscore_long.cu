#include "copies.cuh"
#include "zscore.cuh"
#include "lookback.cuh"

KERNEL {
#include "indices.inl"
#include "load_long.inl"

  constexpr int UNROLL = 8;
#include "zscore_local.inl"

  double linked[3] = {};
  int of_tile = 0;
  if (thread == 0) {
    Moments whole = of_thread(0);
    of_tile = all_taken[0][lane];
    #pragma unroll
    for (int i = 1; i < THREADS; ++i) {
      whole = joined(whole, of_thread(i), decays[all_taken[i][lane]]);
      of_tile += all_taken[i][lane];
    }
    linked[0] = whole.mean;
    linked[1] = whole.var;
    linked[2] = weights[of_tile];
  }
  double after[3];
  auto over = [&](const double* of_one, double decay, double* of_channel) {
    Moments all = joined({of_channel[0], of_channel[1], of_channel[2]}, {of_one[0], of_one[1], of_one[2]}, decay);
    of_channel[0] = all.mean;
    of_channel[1] = all.var;
    of_channel[2] = all.weight;
  };
  link<3, THREADS, TILE>(
      published, tile, channel, n_channels, of_tile, linked, after,
      [&](double* of_channel) {
        Moments first_of_all = moments_before(zi, channel, n_channels);
        of_channel[0] = first_of_all.mean;
        of_channel[1] = first_of_all.var;
        of_channel[2] = first_of_all.weight;
      },
      [&](const double* of_one, int taken, double* of_channel) { over(of_one, decays[taken], of_channel); },
      [&] {
        double decay = decays[TILE];
        return [&over, decay](const double* of_one, double* of_channel) { over(of_one, decay, of_channel); };
      });
  Moments before = {linked[0], linked[1], linked[2]};
#include "zscore_result.inl"
}
