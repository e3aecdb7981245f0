float weight = float(weight_before);
  #pragma unroll
for (int i = 0; i < THREADS - 1; ++i) {
  if (i < thread) {
    state = fmaf(all_decays[i][lane], state, all_local[i][lane]);
    if (WEIGHTED) weight = fmaf(all_decays[i][lane], weight, all_gains[i][lane]);
  }
}
if (!active) return;
// The average after some finite samples of this thread, of which *moved* is that of theirs from a state of zero.
auto average_after = [&](int finite, float moved) {
  float average = before.high + (before.low + fmaf(decays[finite - 1], state, moved));
  return WEIGHTED ? average / fmaf(1.0f - weight, gains[finite], weight) : average;
};
// Each result has its part of the state added at once: to go on from it sample by sample would round that as often.
if (n_finite == SAMPLES) {
    #pragma unroll UNROLL
  for (int i = 0; i < SAMPLES; ++i) {
    to[size_t(i) * n_channels] = average_after(i + 1, samples[i * STRIDE]);
  }
} else {
  // The samples themselves are no longer there, and needed only to tell which are not taken.
  bool all = n_finite == inside;
  int n_before = 0;
    #pragma unroll UNROLL_SOME
  for (int i = 0; i < SAMPLES; ++i) {
    if (i < inside) {
      float result = all ? 0.0f : from[size_t(i) * n_channels];
      if (is_taken(result)) result = average_after(++n_before, samples[i * STRIDE]);
      to[size_t(i) * n_channels] = result;
    }
  }
}
if (thread == THREADS - 1 && tile == (n - 1) / TILE) {
  double of_message = (1.0 - alpha) * before.average + double(fmaf(decays[n_finite], state, local));
  put_pair(zf, channel, n_channels, of_message);
  if (WEIGHTED) {
    // In float64 again, since the next message goes on from it.
    int of_tile = 0;
    for (int i = 0; i < THREADS; ++i) of_tile += all_finite[i][lane];
    double gained = (1.0 - weight_before) * (1.0 - power(1.0 - alpha, of_tile));
    put_pair(zf + 2 * n_channels, channel, n_channels, weight_before + gained);
  }
}
