#pragma once

namespace {

// Brings a sample to shared memory without a detour through registers, and does not wait for it (from Ampere on).
__device__ void begin_copy(float* target, const float* source) {
#if __CUDA_ARCH__ >= 800
  unsigned at = unsigned(__cvta_generic_to_shared(target));
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(at), "l"(source) : "memory");
#else
  *target = *source;
#endif
}

// Waits for those that this thread has begun.
__device__ void end_copies() {
#if __CUDA_ARCH__ >= 800
  asm volatile("cp.async.wait_all;\n" ::: "memory");
#endif
}

}  // namespace
