// A step of a layer of gated recurrent units: see ezmsg.mlx.kernels.cells for the formulas.

#include "recurrentcell.cuh"

KERNEL {
  using namespace ezmsg_mlx;
  constexpr int GATES = 3;
#include "recurrentcell_sums.inl"
  for (int b = 0; b < BATCH; ++b) {
    sums[thread] = of_input[0][b] + of_hidden[0][b];
    sums[THREADS + thread] = of_input[1][b] + of_hidden[1][b];
    // Apart, since the reset gate is on the second alone.
    sums[2 * THREADS + thread] = of_input[2][b];
    sums[3 * THREADS + thread] = of_hidden[2][b];
#include "recurrentcell_added.inl"
    if (thread == 0) {
      float reset = sigmoid(sums[0] + bias[unit]);
      float update = sigmoid(sums[THREADS] + bias[HIDDEN + unit]);
      float inside = sums[3 * THREADS] + bhn[unit];
      float candidate = hyperbolic_tangent(sums[2 * THREADS] + bias[2 * HIDDEN + unit] + reset * inside);
      h_after[b * HIDDEN + unit] = (1.0f - update) * candidate + update * h[b * HIDDEN + unit];
    }
    __syncthreads();
  }
}
