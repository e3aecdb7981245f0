  #pragma unroll
for (int i = 0; i < THREADS - 1; ++i) {
  if (i < thread) before = joined(before, of_thread(i), decays[all_taken[i][lane]]);
}
if (!active) return;
float high = float(before.mean);
Running state = {high, float(before.mean - double(high)), float(before.var)};
float weight = float(before.weight);
float lacks = float(1.0 - before.weight);
float last = weight;
int n_scored = 0;
  #pragma unroll UNROLL
for (int i = 0; i < SAMPLES; ++i) {
  if (i < inside) {
    float result = samples[i * STRIDE];
    if (is_scored(result)) {
      float after = fmaf(lacks, gains[++n_scored], weight);
      float inverse = 1.0f / after;
      result = score(state.take(result, alpha * inverse, beta * last * inverse), state);
      last = after;
    }
    to[size_t(i) * n_channels] = result;
  }
}
if (thread == THREADS - 1 && tile == (n - 1) / TILE) {
  // In float64, since the next message goes on from it.
  Moments after = joined(before, of_thread(thread), decays[n_taken]);
  put_pair(zf, channel, n_channels, after.mean);
  put_pair(zf + 2 * n_channels, channel, n_channels, after.var);
  put_pair(zf + 4 * n_channels, channel, n_channels, after.weight);
}
