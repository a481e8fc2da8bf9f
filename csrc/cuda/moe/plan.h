// How routed experts run on CUDA: what the launches leave for one another. No torch, no device code.
//
// Routes (a token's choice of an expert) are sorted by expert and each expert's are padded to row blocks;
// where a route lies then is its slot. Everything after the sort is laid out by row block, so that
// consecutive slots are what one pass over an expert's weights serves.
#pragma once

#include <cuda_runtime_api.h>
#include <vector_types.h>

#include <cstdint>

#include "../../cpu/moe.h"

namespace trellis::cuda {

// K is cut into segments of so many 128-blocks. Each is summed by itself and segments are added in their
// order, whoever computes them, so a row's bits do not depend on the other rows.
constexpr int kSegmentBlocks = 16;
TRELLIS_ANYWHERE constexpr int segments_of(int64_t blocks) {
  return static_cast<int>((blocks + kSegmentBlocks - 1) / kSegmentBlocks);
}

// Row groups (eights of rows) of a row block where the products are tiles (tiles.cuh, wide_tiles.cuh) or tall ones
// (tall_tiles.cuh) rather than stretches of few rows (experts.cuh), which have one or two.
constexpr int kTileGroups = 16, kTallGroups = 32;
TRELLIS_ANYWHERE constexpr bool are_tiles(int row_groups) { return row_groups >= kTileGroups; }

struct MoeScratch {
  int64_t slots;   // at most
  int row_groups;  // eights of rows in a row block
  int grid;        // thread blocks of the products
  // Row blocks there are; slots, for tiles; whether the pieces of gate and up, and those of down, are cut by cost.
  int* count;                // [4], 16-byte aligned
  int* begins;               // then: [gate and up, down][grid + 1]: a block's first piece
  int* expert;               // [row blocks]
  int* rows;                 // for few rows: [row blocks]: that are not padding
  int* first;                // for tiles: [row blocks]: slot
  longlong2* matrices;       // [row blocks][slices][gate, up, down]: as in the table
  int* route;                // for tiles: [slots], -1: padding
  int* slot;                 // [routes], -1: contributes nothing
  unsigned* arrived_inner;   // [row blocks][slices][128-blocks of inner]: parts of a unit's sums
  unsigned* arrived_hidden;  // the same of hidden
  // FP16 fragments [row blocks][slices][1 or 2: gate, up][k tiles][1 or 2 terms][row groups][32][2] and
  // their scales [...][128-blocks][rows]: powers of two, one for each 128 inputs of a row.
  uint32_t* x;
  float* x_scales;
  uint32_t* inner;  // the same of what down takes
  float* inner_scales;
  // For tiles: x and inner are swizzled atoms of eight rows by 64 inputs,
  // [slices][1 or 2: gate, up][steps][eights of slots][terms][1024 bytes], with one scale for a row.
  float* sums;   // of gate and up: [slices][2][slots][inner]
  float* parts;  // [blocks][2][segments of a unit][row groups][1024]
  float*
      results;  // of down: [slots][slices][hidden]; of tiles, untransformed, [slices][slots][hidden]
};

// Whether few routes go their own way (few_routes.cuh); tests say.
enum class FewRoutes { Never, WhereBest, WhereTheyCan };

// What is chosen from shapes alone, so that launches need no answer from the device.
struct MoePlan {
  // Tiles are multiplied by wgmma (wide_tiles.cuh), else by mma.sync (tiles.cuh): the caller's choice.
  bool wgmma = false;
  FewRoutes few_routes = FewRoutes::WhereBest;
  int grid;  // thread blocks of the products
  int64_t bytes;
};

MoePlan moe_plan(int64_t tokens, int64_t top_k, int64_t experts, int64_t slices, int64_t hidden,
                 int64_t inner, int sm_count);

// All tokens, chunk by chunk. `workspace` holds plan.bytes.
cudaError_t launch_moe(const Moe& m, const MoePlan& plan, void* workspace, cudaStream_t stream);

}  // namespace trellis::cuda
