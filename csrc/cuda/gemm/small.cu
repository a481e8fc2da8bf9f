// The small route's host side: how the matrix is cut, what scratch that takes, the two launches.
#include <algorithm>

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {
namespace {

SmallScratch take_scratch(const Gemm& g, int64_t share, bool fused, Arena& arena) {
  const Operand operand = small_operand(g);
  const int64_t blocks = (g.in_tiles + 7) / 8;
  const int row_groups = small_row_groups(g);
  const int words = operand == Operand::kBytes            ? 1
                    : operand == Operand::kBytesTwoPasses ? 2
                                                          : 2 * row_groups;
  SmallScratch scratch = {};
  Rotated& rotated = scratch.rotated;
  if (!fused) {
    rotated.row_groups = row_groups;
    rotated.tile_words = 32 * words;
    rotated.low_words = 16 * words;
    rotated.x = arena.take<uint32_t>(blocks * 8 * rotated.tile_words);
    rotated.row_scales = arena.take<float>(row_groups * kSmallRows);
    if (is_integer(operand)) {
      rotated.scales = arena.take<float>(blocks * kSmallRows);
      rotated.corrections = arena.take<float>(blocks * kSmallRows);
    }
  }
  rotated.counters = small_column_blocks(g);
  rotated.arrived = arena.take<unsigned>(rotated.counters);
  scratch.parts = arena.take<float>(small_stretches(g, share) * 2 * row_groups * kSmallSums);
  return scratch;
}

}  // namespace

int64_t small_share(const Gemm& g, const Gpu& gpu, bool fused) {
  // What registers allow and what shared memory does, of which the system takes 1 KiB a block. A
  // longer share leaves room for fewer blocks, and fewer blocks take longer shares.
  int resident = small_resident(small_operand(g), small_row_groups(g));
  for (;; --resident) {
    // Whole groups for each warp of as many blocks as the GPU holds at once.
    const int64_t warps = static_cast<int64_t>(gpu.sm_count) * resident * kDepthWarps;
    const int64_t share = (small_groups(g) + warps - 1) / warps * kDepthWarps;
    const int64_t bytes = (small_shared_bytes(g, share, fused) + 1024) * resident;
    if (bytes <= gpu.shared_bytes || (resident == 1 && !fused)) return share;
    if (resident == 1) return 0;
  }
}

bool fused_fits(const Gemm& g, const Gpu& gpu) {
  return g.m <= kSmallRows && small_share(g, gpu, true) == small_share(g, gpu, false);
}

int64_t small_scratch_bytes(const Gemm& g, int64_t share, bool fused) {
  Arena arena(nullptr);
  take_scratch(g, share, fused, arena);
  return arena.bytes();
}

cudaError_t launch_small(const Gemm& g, void* memory, int64_t share, bool fused,
                         cudaStream_t stream) {
  Arena arena(memory);
  const SmallScratch scratch = take_scratch(g, share, fused, arena);
  const Operand operand = small_operand(g);
  const int rows = operand == Operand::kBytes ? 4 : scratch.rotated.row_groups * kSmallRows;
  const cudaError_t error =
      fused ? launch_zero(scratch.rotated.arrived, scratch.rotated.counters, stream)
            : launch_rotate(g, scratch.rotated, operand, rows, stream);
  if (error != cudaSuccess) return error;
  return with_rate(g.tile_words, [&](auto tile_words) {
    return launch_small_rate<tile_words.value>(g, scratch, static_cast<int>(share), fused, stream);
  });
}

}  // namespace trellis::cuda
