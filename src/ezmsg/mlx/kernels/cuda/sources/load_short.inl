// The samples of this thread, in registers.
float samples[SAMPLES];
constexpr int STRIDE = 1;
if (inside == SAMPLES) {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) samples[i] = from[size_t(i) * n_channels];
} else {
  #pragma unroll
  for (int i = 0; i < SAMPLES; ++i) samples[i] = i < inside ? from[size_t(i) * n_channels] : no_sample();
}
