// The Metal Shading Language as far as the kernels use it, for a compiler of CUDA, as metal_emulation.hpp is for one of
// C++. A kernel becomes a function of the device, and what calls it is written by metal_cuda.py.

using uint = unsigned;
using ushort = unsigned short;
using uchar = unsigned char;
using ulong = unsigned long;
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned;
using uint64_t = unsigned long;
// Its bits.
using bfloat16_t = unsigned short;

// CUDA takes a function for one of the host unless it says otherwise.
#define inline inline __device__

enum class mem_flags : int { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }

// CUDA has one barrier, which orders all memory: which kind a kernel asks for cannot be tried here.
#define threadgroup_barrier(flags) __syncthreads()

namespace metal {

using ::abs;
using ::cos;
using ::exp;
using ::fabs;
using ::fma;
using ::log;
using ::max;
using ::min;
using ::sin;
using ::sqrt;
using ::tanh;

inline uint popcount(uint a) { return __popc(a); }
inline float rsqrt(float a) { return 1.0f / ::sqrtf(a); }
inline float clamp(float a, float low, float high) { return ::fminf(::fmaxf(a, low), high); }
inline bool isfinite(float a) { return ::fabsf(a) <= 3.402823466e38f; }

template <typename T>
inline T select(T if_false, T if_true, bool condition) {
  return condition ? if_true : if_false;
}

template <typename To, typename From>
inline To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps all bits");
  union {
    From from;
    To to;
  } both = {value};
  return both.to;
}

namespace precise {
using namespace metal;
}
namespace fast {
using namespace metal;
}

}  // namespace metal

using namespace metal;
