// A step of a layer of LSTM cells: see ezmsg.mlx.kernels.cells for the formulas.

#include "recurrentcell.h"

KERNEL {
  using namespace ezmsg_mlx;
  constexpr uint GATES = 4;
#include "recurrentcell_sums.inl"
  for (uint b = 0; b < BATCH; ++b) {
    for (uint gate = 0; gate < GATES; ++gate) {
      sums[gate * THREADS + index] = of_input[gate * BATCH + b] + of_hidden[gate * BATCH + b];
    }
#include "recurrentcell_added.inl"
    // What it reads of the sums, no other thread writes for the next row.
    if (index == 0) {
      float taken = sigmoid(sums[0] + bias[unit]);
      float kept = sigmoid(sums[THREADS] + bias[HIDDEN + unit]);
      float candidate = hyperbolic_tangent(sums[2 * THREADS] + bias[2 * HIDDEN + unit]);
      float shown = sigmoid(sums[3 * THREADS] + bias[3 * HIDDEN + unit]);
      float cell = kept * c[b * HIDDEN + unit] + taken * candidate;
      c_after[b * HIDDEN + unit] = cell;
      h_after[b * HIDDEN + unit] = shown * hyperbolic_tangent(cell);
    }
  }
}
