// A step of a layer of recurrent cells: see ezmsg.mlx.kernels.cells for the formulas. A block computes some hidden
// units, and a team of its threads shares the columns of the weights of one.

#include "recurrentcell.cuh"

KERNEL {
  using namespace ezmsg_mlx;
  __shared__ float sums[4 * THREADS];
  run_units<BITS, bool(IS_LSTM), BATCH, INPUT, HIDDEN, GROUP, THREADS, FIRST_UNITS>(
      layer, blockIdx.x * FIRST_UNITS, sums, nullptr, [&] { return x; }, [] { return false; });
}
