// A step of a layer of gated recurrent units: see ezmsg.mlx.kernels.cells for the formulas.

#include "recurrentcell.h"

KERNEL {
  using namespace ezmsg_mlx;
  constexpr uint GATES = 3;
#include "recurrentcell_sums.inl"
  for (uint b = 0; b < BATCH; ++b) {
    sums[index] = of_input[b] + of_hidden[b];
    sums[THREADS + index] = of_input[BATCH + b] + of_hidden[BATCH + b];
    // Apart, since the reset gate is on the second alone.
    sums[2 * THREADS + index] = of_input[2 * BATCH + b];
    sums[3 * THREADS + index] = of_hidden[2 * BATCH + b];
#include "recurrentcell_added.inl"
    // What it reads of the sums, no other thread writes for the next row.
    if (index == 0) {
      float reset = sigmoid(sums[0] + bias[unit]);
      float update = sigmoid(sums[THREADS] + bias[HIDDEN + unit]);
      float inside = sums[3 * THREADS] + bhn[unit];
      float candidate = hyperbolic_tangent(sums[2 * THREADS] + bias[2 * HIDDEN + unit] + reset * inside);
      h_after[b * HIDDEN + unit] = (1.0f - update) * candidate + update * h[b * HIDDEN + unit];
    }
  }
}
