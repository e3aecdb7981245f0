// The Metal Shading Language as far as the kernels use it, for a C++ compiler. What runs them is in the .cpp beside.

#include <stddef.h>
#include <stdint.h>
#include <string.h>

using uint = unsigned;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
// Its bits.
using bfloat16_t = unsigned short;

struct uint3 {
  uint x, y, z;
};

#define device
#define constant
#define thread
#define kernel
// One copy for all threads, in memory that is spoilt before each group starts, and whose size is looked at.
#define threadgroup static __attribute__((used, section("threadgroup_memory")))

namespace emulation {

// Which memory a barrier orders.
enum { DEVICE = 1, THREADGROUP = 2 };

struct Call {
  void** buffers;
  uint3 grid, group;
  // 0: ascending, 1: descending, else the seed of a random order.
  unsigned order;
  void (*body)(const Call&);
  const char* group_memory;
  size_t group_memory_size;
};

struct Position {
  uint3 thread_position_in_threadgroup, threadgroup_position_in_grid, threads_per_threadgroup, threadgroups_per_grid,
      thread_position_in_grid, threads_per_grid;
  uint thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
};

const Position& position();
void barrier(int memory, int line);

}  // namespace emulation

enum class mem_flags : int { mem_none = 0, mem_device = emulation::DEVICE, mem_threadgroup = emulation::THREADGROUP };

constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

#define threadgroup_barrier(flags) ::emulation::barrier(int(flags), __LINE__)

namespace metal {

inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float abs(float a) { return __builtin_fabsf(a); }
inline float fabs(float a) { return __builtin_fabsf(a); }
inline float sqrt(float a) { return __builtin_sqrtf(a); }
inline float exp(float a) { return __builtin_expf(a); }
inline uint min(uint a, uint b) { return a < b ? a : b; }
inline uint max(uint a, uint b) { return a < b ? b : a; }
inline float min(float a, float b) { return a < b ? a : b; }
inline float max(float a, float b) { return a < b ? b : a; }
inline uint popcount(uint a) { return __builtin_popcount(a); }

template <typename T>
inline T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps all bits");
  To result;
  memcpy(&result, &value, sizeof(result));
  return result;
}

}  // namespace metal

using namespace metal;

// Metal has none of these.
#ifdef COUNTED
namespace emulation {

extern "C" unsigned long emulation_operations;

// A float that counts what is computed with it: fused multiply-add, addition, multiplication, division and square root
// as one operation each; comparisons and signs not at all.
struct Float {
  float value;
  Float() = default;
  constexpr Float(float given) : value(given) {}
  constexpr explicit Float(uint given) : value(given) {}
  Float operator-() const { return -value; }
};

inline Float counted(float value) {
  ++emulation_operations;
  return value;
}

inline Float operator+(Float a, Float b) { return counted(a.value + b.value); }
inline Float operator-(Float a, Float b) { return counted(a.value - b.value); }
inline Float operator*(Float a, Float b) { return counted(a.value * b.value); }
inline Float operator/(Float a, Float b) { return counted(a.value / b.value); }
inline Float& operator+=(Float& a, Float b) { return a = a + b; }
inline Float& operator*=(Float& a, Float b) { return a = a * b; }
inline Float& operator/=(Float& a, Float b) { return a = a / b; }
inline bool operator<=(Float a, Float b) { return a.value <= b.value; }
inline bool operator>(Float a, Float b) { return a.value > b.value; }
inline bool operator!=(Float a, Float b) { return a.value != b.value; }

}  // namespace emulation

namespace metal {

inline emulation::Float fma(emulation::Float a, emulation::Float b, emulation::Float c) {
  return emulation::counted(fma(a.value, b.value, c.value));
}
inline emulation::Float sqrt(emulation::Float a) { return emulation::counted(sqrt(a.value)); }
inline emulation::Float fabs(emulation::Float a) { return fabs(a.value); }

}  // namespace metal

#define float emulation::Float
#endif

#pragma GCC poison double new delete malloc calloc realloc alloca try catch throw virtual dynamic_cast typeid
