// Threshold crossings, one thread a channel: with what a message has, the memory of the state machine is the whole
// cost, and threads need nothing of each other.

#include "strips.h"

#define UNROLL _Pragma("clang loop unroll(full)")

namespace ezmsg_mlx {

// Larger samples, and what is not finite, leave a running scale alone.
constant constexpr float LARGEST_SCALED = 1e15f;
// As for z-scores.
constant constexpr float SMALLEST_VARIANCE = 7.52316384526264e-37f;
constant constexpr float RESOLUTION = 2.3283064365386963e-10f;
constant constexpr float UNDER = 1.0f;
constant constexpr float OVER = 2.0f;
constant constexpr float NORMAL = 1.4826022185056018f;
constant constexpr float STEP = 1.1664f;
constant constexpr float EAGERNESS = 7.0f;
constant constexpr uint NONE = 0;
constant constexpr uint ZSCORE = 1;
constant constexpr uint RMS = 2;

inline float magnitude(float value) { return metal::fabs(value); }

inline float root(float value) { return metal::sqrt(value); }

}  // namespace ezmsg_mlx

KERNEL {
  using namespace ezmsg_mlx;
  uint channel = thread_position_in_grid.x;
  if (channel >= uint(x_shape[1])) return;
#include "crossings.inl"
}
