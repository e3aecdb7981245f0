const double* decays = doubles(table) + 1;
const double* weights = decays + TILE + 1;
float alpha = float(doubles(table)[0]);
float beta = float(decays[1]);
// The weight of the first samples of a thread, and the shares in it of the last of them and of those before.
__shared__ float gains[SAMPLES + 1];
__shared__ float shares[SAMPLES + 1];
__shared__ float rests[SAMPLES + 1];
for (int i = thread * LANES + lane; i <= SAMPLES; i += THREADS * LANES) {
  gains[i] = float(weights[i]);
  shares[i] = i ? float(weights[1] / weights[i]) : 0.0f;
  rests[i] = i ? float(decays[1] * weights[i - 1] / weights[i]) : 1.0f;
}
__syncthreads();

// The moments of this thread's samples alone.
Running local = {0.0f, 0.0f, 0.0f};
int n_taken = 0;
  #pragma unroll UNROLL
for (int i = 0; i < SAMPLES; ++i) {
  float sample = samples[i * STRIDE];
  if (is_scored(sample)) {
    ++n_taken;
    local.take(sample, shares[n_taken], rests[n_taken]);
  }
}
__shared__ double all_means[THREADS][LANES];
__shared__ float all_vars[THREADS][LANES];
__shared__ int all_taken[THREADS][LANES];
all_means[thread][lane] = double(local.mean) + double(local.low);
all_vars[thread][lane] = local.var;
all_taken[thread][lane] = n_taken;
__syncthreads();
// The moments of the samples of the first threads alone.
auto of_thread = [&](int i) {
  return Moments{all_means[i][lane], double(all_vars[i][lane]), weights[all_taken[i][lane]]};
};
