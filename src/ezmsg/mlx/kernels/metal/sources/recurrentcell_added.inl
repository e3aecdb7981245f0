threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint part = THREADS / 2; part > 0; part /= 2) {
  if (index < part) {
    for (uint k = 0; k < 4; ++k) sums[k * THREADS + index] += sums[k * THREADS + index + part];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
