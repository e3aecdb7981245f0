  #pragma unroll
for (int i = 0; i < THREADS - 1; ++i) {
  if (i < thread) state = fmaf(all_decays[i][lane], state, all_alone[i][lane]);
}
if (!active) return;
// Each result has its part of the state added at once: to go on from it sample by sample would round that as often.
if (n_finite == SAMPLES) {
    #pragma unroll UNROLL
  for (int i = 0; i < SAMPLES; ++i) {
    to[size_t(i) * n_channels] = before.high + (before.low + fmaf(decays[i], state, samples[i * STRIDE]));
  }
} else {
  // The samples themselves are no longer there, and needed only to tell which are not finite.
  bool all = n_finite == inside;
  int n_before = 0;
    #pragma unroll UNROLL_SOME
  for (int i = 0; i < SAMPLES; ++i) {
    if (i < inside) {
      float result = all ? before.high : from[size_t(i) * n_channels];
      if (fabsf((result - before.high) - before.low) < LARGEST) {
        result = before.high + (before.low + fmaf(decays[n_before++], state, samples[i * STRIDE]));
      }
      to[size_t(i) * n_channels] = result;
    }
  }
}
if (thread == THREADS - 1 && tile == (n - 1) / TILE) {
  double of_message = (1.0 - alpha) * before.average + double(fmaf(decays[n_finite], state, alone));
  float high = float(of_message);
  zf[channel] = high;
  zf[n_channels + channel] = float(of_message - double(high));
}
