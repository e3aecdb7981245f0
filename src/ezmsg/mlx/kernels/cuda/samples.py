"""Which samples of a message a thread of a kernel for CUDA works on, and how they come to it."""

from __future__ import annotations

LANES = 32
"""Channels of a block for a long message: the threads of a warp."""

SAMPLES = 40
"""Samples of a thread for a long message. Measured on an H200 at 30000 x 1024: two sections take 93 us with 40 samples,
96 with 48, 101 to 107 with 32, 36 and 44; EWMA 74 with 40 and 81 with 32, where ``x + 1`` takes 72."""

THREADS = 5
"""Threads of such a block along time; and the tiles before its own that it listens to."""

TILE = THREADS * SAMPLES
"""Samples of such a block."""

PLACE = r"""
  // Of 32 bits as far as they can be: a division of 64 takes some sixty instructions.
  unsigned n = x_shape[0];
  unsigned n_channels = x_shape[1];
  unsigned n_groups = (n_channels + LANES - 1) / LANES;
  unsigned tile = blockIdx.x / n_groups;
  int thread = threadIdx.y;
  int lane = threadIdx.x;
  unsigned channel = blockIdx.x % n_groups * LANES + lane;
  bool active = channel < n_channels;
  if (!active) channel = n_channels - 1;
  unsigned first = tile * TILE + thread * SAMPLES;
  int inside = first >= n ? 0 : n - first < SAMPLES ? int(n - first) : SAMPLES;
  const float* from = x + size_t(first) * n_channels + channel;
  float* to = y + size_t(first) * n_channels + channel;
"""
"""What a thread works on: of ``SAMPLES`` samples of ``channel`` the first ``inside``, the others being past the end of
the message. They are ``n_channels`` apart from ``from`` on, the results from ``to`` on. A thread beyond the last
channel repeats that one and writes nothing."""

COPIES = r"""
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
"""
"""Shared memory for the samples of a tile: a thread that kept its own in registers would leave room for few others."""


def blocks(n_samples: int, n_channels: int) -> dict[str, tuple[int, int, int]]:
    """The blocks for a long message, in the words of ``mlx.core.fast.cuda_kernel``.

    All along x, tile after tile, since that is the order in which they start.
    """
    n_blocks = -(-n_samples // TILE) * -(-n_channels // LANES)
    return {"grid": (n_blocks * LANES, THREADS, 1), "threadgroup": (LANES, THREADS, 1)}
