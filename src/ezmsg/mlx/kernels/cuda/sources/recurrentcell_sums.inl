// A block for each hidden unit. Its threads share the columns of the weights, and add up what they have in halves.
const int unit = blockIdx.x, thread = threadIdx.x;
float of_input[GATES][BATCH] = {}, of_hidden[GATES][BATCH] = {};
add_products<BITS, GATES, BATCH, INPUT, HIDDEN, GROUP, THREADS>(wx, wx_scales, wx_offsets, x, unit, thread, of_input);
add_products<BITS, GATES, BATCH, HIDDEN, HIDDEN, GROUP, THREADS>(wh, wh_scales, wh_offsets, h, unit, thread, of_hidden);
__shared__ float sums[4 * THREADS];
