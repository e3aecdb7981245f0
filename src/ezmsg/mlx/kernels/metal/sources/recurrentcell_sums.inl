// A threadgroup for each hidden unit. Its threads share the columns of the weights, and add up what they have in
// halves.
uint unit = threadgroup_position_in_grid.x;
uint index = thread_position_in_threadgroup.x;
float of_input[GATES * BATCH];
float of_hidden[GATES * BATCH];
for (uint k = 0; k < GATES * BATCH; ++k) {
  of_input[k] = 0.0f;
  of_hidden[k] = 0.0f;
}
add_products<BITS, GATES, BATCH, INPUT, HIDDEN, GROUP, THREADS>(
    (const device uint*)wx, wx_scales, wx_offsets, x, unit, index, of_input);
add_products<BITS, GATES, BATCH, HIDDEN, HIDDEN, GROUP, THREADS>(
    (const device uint*)wh, wh_scales, wh_offsets, h, unit, index, of_hidden);
threadgroup float sums[4 * THREADS];
