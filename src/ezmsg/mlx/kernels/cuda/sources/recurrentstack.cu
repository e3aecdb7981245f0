// A step of a stack of layers and a linear layer behind it, in one launch.
//
// Stages follow each other: samples are copied from the host, each layer is computed, then the results. A stage has
// tiles, one for a block. Blocks take the tiles in order, so that those of earlier stages have begun, and wait for
// nobody who has not. What a layer needs of its own state is computed before it waits for the one before.

#include "recurrentcell.cuh"

KERNEL {
  using namespace ezmsg_mlx;
  constexpr int SAMPLES = BATCH * INPUT, COPIED = 4 * THREADS, TEAM = THREADS / UNITS;
  constexpr int COPIES = (SAMPLES + COPIED - 1) / COPIED, FIRST_TILES = (HIDDEN + FIRST_UNITS - 1) / FIRST_UNITS;
  constexpr int TILES = (HIDDEN + UNITS - 1) / UNITS;
  __shared__ float sums[4 * THREADS];
  __shared__ int next_tile;
  const int thread = threadIdx.x;
  const unsigned* counts = reinterpret_cast<const unsigned*>(zeros);
  float* between = kept + (DONE + LAYERS + 1) * COUNTS_APART;
  if (thread == 0) next_tile = int(atomicAdd(count_of(counts, NEXT_TILE), 1u));
  __syncthreads();
  int tile = next_tile;
  // For the next launch, since those of this one are used up.
  if (tile == 0) {
    for (int i = thread; i < (DONE + LAYERS + 1) * COUNTS_APART; i += THREADS) kept[i] = 0.0f;
  }
  float* results = between + SAMPLES;
  if (tile < COPIES) {
    bool is_finite = true;
    for (int i = tile * COPIED + thread; i < SAMPLES && i < (tile + 1) * COPIED; i += THREADS) {
      const float sample = x[i];
      between[i] = sample;
      is_finite = is_finite && fabsf(sample) < __int_as_float(0x7f800000);
    }
    if (!__syncthreads_and(is_finite) && thread == 0) atomicAdd(count_of(counts, NOT_FINITE), 1u);
    arrive(counts, 0);
    return;
  }
  tile -= COPIES;
  const auto is_kept = [&] { return *(volatile const unsigned*)count_of(counts, NOT_FINITE) != 0; };
  if (tile < FIRST_TILES) {
    const Layer layer = layer_of(0);
    const auto samples = [&]() -> const float* {
      wait_for(counts, 0, COPIES);
      return between;
    };
    run_units<BITS, bool(IS_LSTM), BATCH, INPUT, HIDDEN, GROUP, THREADS, FIRST_UNITS>(
        layer, tile * FIRST_UNITS, sums, results, samples, is_kept);
    arrive(counts, 1);
    return;
  }
  tile -= FIRST_TILES;
  const int number = tile / TILES + 1 < LAYERS ? tile / TILES + 1 : LAYERS;
  const float* before = results + (number - 1) * BATCH * HIDDEN;
  const auto waited_for = [&]() -> const float* {
    wait_for(counts, number, number == 1 ? FIRST_TILES : TILES);
    return before;
  };
  if (number < LAYERS) {
    const Layer layer = layer_of(number);
    run_units<BITS, bool(IS_LSTM), BATCH, HIDDEN, HIDDEN, GROUP, THREADS, UNITS>(
        layer, tile % TILES * UNITS, sums, results + number * BATCH * HIDDEN, waited_for, is_kept);
    arrive(counts, number + 1);
    return;
  }
  const int row = (tile - (LAYERS - 1) * TILES) * UNITS + thread / TEAM, member = thread % TEAM;
  const Matrix weights = head_weights();
  const float* head_bias = biases + LAYERS * BIASES;
  float* results_of_head = results_at();
  float total[4][BATCH] = {};
  if (row < OUT) begin_rows<BITS, 1, HIDDEN, TEAM>(weights, row, 0, member);
  const float* last = waited_for();
  if (row < OUT) add_products<BITS, 1, 0, BATCH, HIDDEN, GROUP, TEAM>(weights, last, row, 0, member, total);
  for (int b = 0; b < BATCH; ++b) {
    add_up<BATCH, THREADS, TEAM>(sums, thread, total, b);
    if (row < OUT && member == 0) {
      results_of_head[b * OUT + row] = sums[thread] + head_bias[row];
    }
    __syncthreads();
  }
}
