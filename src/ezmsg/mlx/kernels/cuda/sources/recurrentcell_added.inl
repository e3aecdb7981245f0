__syncthreads();
for (int half = THREADS / 2; half > 0; half /= 2) {
  if (thread < half) {
    for (int k = 0; k < 4; ++k) sums[k * THREADS + thread] += sums[k * THREADS + thread + half];
  }
  __syncthreads();
}
