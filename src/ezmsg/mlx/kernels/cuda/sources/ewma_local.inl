double alpha = double(table[0]) + double(table[1]);
float alpha_f = table[0];
float beta_f = table[5];
Before before = state_before(zi, channel, n_channels, alpha);
// What is left of a state after some finite samples.
__shared__ float decays[SAMPLES + 1];
// And what a weight has gained of what it lacked.
__shared__ float gains[WEIGHTED ? SAMPLES + 1 : 1];
for (int i = thread * LANES + lane; i <= SAMPLES; i += THREADS * LANES) {
  decays[i] = table[4 + i];
  if (WEIGHTED) gains[i] = table[GAINS + i];
}

// What this thread's samples alone make of a state of zero; and in the place of each that is finite, of the average.
float local = 0.0f;
int n_finite = 0;
  #pragma unroll UNROLL
for (int i = 0; i < SAMPLES; ++i) {
  if (is_taken(samples[i * STRIDE])) {
    float deviation = (samples[i * STRIDE] - before.high) - before.low;
    float moved = fmaf(alpha_f, deviation, local);
    samples[i * STRIDE] = moved;
    local = beta_f * moved;
    ++n_finite;
  }
}
__shared__ float all_local[THREADS][LANES];
__shared__ float all_decays[THREADS][LANES];
all_local[thread][lane] = local;
all_decays[thread][lane] = table[4 + n_finite];
__shared__ float all_gains[WEIGHTED ? THREADS : 1][LANES];
if (WEIGHTED) all_gains[thread][lane] = table[GAINS + n_finite];
__shared__ int all_finite[THREADS][LANES];
all_finite[thread][lane] = n_finite;
