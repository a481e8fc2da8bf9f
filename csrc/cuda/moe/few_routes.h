// The way of few routes (few_routes.cuh) as its callers see it. No device code.
#pragma once

#include "plan.h"

namespace trellis::cuda {

constexpr int kFewRoutes =
    16;  // at most: with more, products of few rows (experts.cuh) are as fast or faster
constexpr int kFewTiles = 8;  // that a warp multiplies at a time
// Of a rate: as many as a kilobyte holds.
__host__ __device__ constexpr int few_tiles_of(int tile_words) {
  return tile_words <= 64 ? kFewTiles : 512 / tile_words;
}
constexpr int kFewHeld = kFewTiles * 16 * 8 / 256;  // sums of eight rows for a thread
constexpr int kFewStages = 3;  // of a warp's ring of packed words, each of them two k tiles
constexpr int kFewStageBytes = 2 * kFewTiles * 128;
// Features of a row's sums: rows are so far apart that a warp's stores go to different banks.
constexpr int kFewPartFeatures = kFewTiles * 16 + 4;
// Shared memory of a block without what its rows need.
constexpr int kFewFixedBytes = 50 * 1024;

struct FewScratch {
  // Rotated rows of gate and up, and of down: [routes][slices][rotations][terms][k tiles][2], fragments of one row, so
  // that a lane's two pairs are neighbours; [...][128-blocks]: powers of two that they are to be multiplied by.
  uint4* rows[2];
  float* scales[2];
  // Raw sums.
  float* sums;     // [routes][slices][gate, up][inner]
  float* results;  // of down: [routes][slices][hidden]
};

// Rows that a pass over an expert's weights may serve, by what a block has room for.
struct FewPlan {
  int blocks_of_sm;
  int rows;  // none: they cannot
  bool is_best;
  int shared_bytes;  // of a block
};

FewPlan plan_few_routes(const Moe& m, bool exact);

cudaError_t launch_few_routes(bool exact, const Moe& m, const FewScratch& scratch,
                              const FewPlan& plan, cudaStream_t stream);

}  // namespace trellis::cuda
