// The small route's host side: how the matrix is cut, what scratch that takes, the two launches.
#include <algorithm>
#include <cstdint>

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

// What counts is how much one multiprocessor gets at most: rounds * share groups, and what it costs to begin
// and to end a column block, as often as the worst block has to: about as long as 36 k tiles take. One block
// alone, with two warps a scheduler, is slower by an eighth.
int64_t small_share(const Gemm& g, int sm_count) {
  const int64_t groups = small_groups(g) / small_column_blocks(g);
  const int64_t total = small_groups(g);
  const SmallCut cut = small_cut(g);
  const int64_t warps = cut.depth();
  const int64_t end_cost = (36 + 8 * (small_row_groups(g) - 1)) / cut.group;  // in groups
  const int64_t most = std::max<int64_t>(warps, total * 3 / 2 / sm_count);
  int64_t best = warps, best_cost = INT64_MAX;
  // Whole groups for each warp; the longest first, since of two that cost the same it leaves fewer parts.
  for (int64_t share = most / warps * warps; share * 10 >= most; share -= warps) {
    const int64_t rounds = (small_stretches(g, share) + sm_count - 1) / sm_count;
    const bool aligned = groups % share == 0 || share % groups == 0;
    const int64_t ends = aligned ? std::max<int64_t>(1, share / groups) : 2 + (share - 1) / groups;
    const int64_t cost = rounds * (share * (rounds == 1 ? 9 : 8) + ends * end_cost * 8);
    if (cost < best_cost) best = share, best_cost = cost;
  }
  return best;
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
