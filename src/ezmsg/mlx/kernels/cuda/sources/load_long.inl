// The samples of this thread, in shared memory.
constexpr int STRIDE = THREADS * LANES;
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
