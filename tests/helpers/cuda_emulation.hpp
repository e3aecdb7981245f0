// CUDA as far as the kernels use it, for a C++ compiler. What runs them is in the .cpp beside, which is compiled once.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define __device__
// Of one block, and not cleared: the next block that runs in the same thread finds what the last one left.
#define __shared__ static thread_local

struct Index {
  unsigned x, y, z;
};

// Not thread_local, which looks at each use whether another file has something to begin with.
extern __thread Index threadIdx, blockIdx;

// Of <math.h> no more than this: it takes nine tenths of the time that a kernel takes to compile.
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaxf(float x, float y) { return __builtin_fmaxf(x, y); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline float expf(float x) { return __builtin_expf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }

namespace emulation {

// What all threads of the block do before any of them goes on; whether all brought true.
bool wait_for_block(bool value);

// A word of another block is looked at, maybe in vain.
void look();

void run_all(unsigned n_blocks, Index size, unsigned n_at_once, void (*body)(const void*), const void* data);

// *n_at_once* blocks at a time, which start in the order of their index.
template <typename Body>
void run(unsigned n_blocks, Index size, unsigned n_at_once, const Body& body) {
  run_all(n_blocks, size, n_at_once, [](const void* data) { (*static_cast<const Body*>(data))(); }, &body);
}

template <typename To, typename From>
inline To same_bits(From value) {
  To result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

}  // namespace emulation

inline void __syncthreads() { emulation::wait_for_block(true); }
inline bool __syncthreads_and(bool value) { return emulation::wait_for_block(value); }

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __int_as_float(int value) { return emulation::same_bits<float>(value); }
inline long long __double_as_longlong(double value) { return emulation::same_bits<long long>(value); }
inline double __longlong_as_double(long long value) { return emulation::same_bits<double>(value); }

struct alignas(16) ulonglong2 {
  unsigned long long x, y;
};

inline ulonglong2 __ldcv(const ulonglong2* at) {
  // What a block hears from another goes through here.
  emulation::look();
  return *at;
}

// One half, then the other, and others may look in between.
inline void __stwt(ulonglong2* at, ulonglong2 word) {
  emulation::look();
  at->y = word.y;
  emulation::look();
  at->x = word.x;
}

inline void __nanosleep(unsigned) { emulation::look(); }

// Blocks take turns, so that nothing comes between.
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  emulation::look();
  unsigned before = *at;
  *at = before + value;
  return before;
}

inline void __threadfence() { emulation::look(); }
