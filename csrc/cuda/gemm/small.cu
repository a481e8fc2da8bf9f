// The small route's host side: how the matrix is cut, what scratch that takes, the two launches.
#include <algorithm>

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {
namespace {

SmallScratch take_scratch(const Gemm& g, int64_t share, Arena& arena) {
  const Operand operand = small_operand(g);
  const int64_t blocks = (g.in_tiles + 7) / 8;
  const int row_groups = small_row_groups(g);
  const int words = operand == Operand::kBytes            ? 1
                    : operand == Operand::kBytesTwoPasses ? 2
                                                          : 2 * row_groups;
  SmallScratch scratch = {};
  Rotated& rotated = scratch.rotated;
  rotated.row_groups = row_groups;
  rotated.x = arena.take<uint32_t>(blocks * 8 * 32 * words);
  rotated.row_scales = arena.take<float>(row_groups * kSmallRows);
  if (is_integer(operand)) {
    rotated.scales = arena.take<float>(blocks * kSmallRows);
    rotated.corrections = arena.take<float>(blocks * kSmallRows);
  }
  rotated.counters = small_column_blocks(g);
  rotated.arrived = arena.take<unsigned>(rotated.counters);
  scratch.parts = arena.take<float>(small_stretches(g, share) * 2 * row_groups * kSmallSums);
  return scratch;
}

}  // namespace

int64_t small_share(const Gemm& g, int sm_count) {
  // What registers allow and what shared memory does, of which the system takes 1 KiB a block.
  const int bytes =
      small_stages(g.tile_words) * kSmallWarps * kSmallGroup * kWarpTiles * g.tile_words * 2 +
      kSmallSums * 4 + 8 + 1024;
  const int resident =
      std::min(small_resident(small_operand(g), small_row_groups(g)), 228 * 1024 / bytes);
  // Whole groups for each warp of as many blocks as the GPU holds at once.
  const int64_t warps = static_cast<int64_t>(sm_count) * resident * kDepthWarps;
  return (small_groups(g) + warps - 1) / warps * kDepthWarps;
}

int64_t small_scratch_bytes(const Gemm& g, int64_t share) {
  Arena arena(nullptr);
  take_scratch(g, share, arena);
  return arena.bytes();
}

cudaError_t launch_small(const Gemm& g, void* memory, int64_t share, cudaStream_t stream) {
  Arena arena(memory);
  const SmallScratch scratch = take_scratch(g, share, arena);
  const Operand operand = small_operand(g);
  const int rows = operand == Operand::kBytes ? 4 : scratch.rotated.row_groups * kSmallRows;
  const cudaError_t error = launch_rotate(g, scratch.rotated, operand, rows, stream);
  if (error != cudaSuccess) return error;
  return with_rate(g.tile_words, [&](auto tile_words) {
    return launch_small_rate<tile_words.value>(g, scratch, static_cast<int>(share), stream);
  });
}

}  // namespace trellis::cuda
