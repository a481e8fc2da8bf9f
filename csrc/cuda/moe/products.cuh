// What the two kernels of few rows have in common (experts.cuh, few_routes.cuh): how warps share K, in which units
// they sum, and the product of one tile. Both add in the same order, so that a row's bits do not depend on which
// of them its batch goes to.
//
// K is cut into segments (plan.h). Eight warps share a segment, in groups of two k tiles; a warp adds its groups in
// their order, then the warps' sums are added in theirs, then the segments'.
#pragma once

#include "../../rates.h"
#include "../decode/decode.cuh"
#include "vectors.cuh"

namespace trellis::cuda {

constexpr int kExpertWarps = 8;                 // which share a segment
constexpr int kExpertGroup = 2;                 // k tiles fetched and multiplied at a time
constexpr int kBlockGroups = 8 / kExpertGroup;  // groups of 128 inputs

// Groups of a segment, and the first one of a warp (of the next warp: the end of this one's).
__device__ __forceinline__ int groups_of_segment(int segment, int blocks) {
  return kBlockGroups * min(kSegmentBlocks, blocks - segment * kSegmentBlocks);
}
__device__ __forceinline__ int first_group_of(int warp, int groups) {
  return groups * warp / kExpertWarps;
}

// PowersOfTwo for a function that is not inlined, whose arguments lie in memory.
__device__ __forceinline__ PowersOfTwo held_powers_of_two() {
  PowersOfTwo powers;
#pragma unroll
  for (int i = 0; i < 17; ++i) asm("mov.b32 %0, %1;" : "=r"(powers.of[i]) : "r"(1u << i));
  return powers;
}

// A lane's view of eight rows. Their sums are in units of the largest scale so far: a 128-block with a smaller one
// gets smaller fragments, and sums shrink where a larger one comes. Powers of two, so nothing is rounded that would
// count beside the larger block.
struct RowUnits {
  float2 sums = {0.0f, 0.0f};  // of the two rows of this lane's sums
  float x = 0.0f;              // of the row of its fragments
  __half2 shrink;              // what fragments are multiplied by

  // This lane's pair of fragments, in those units.
  __device__ __forceinline__ uint2 shrunk(uint2 pair) const {
    return uint2{times(pair.x, shrink), times(pair.y, shrink)};
  }

  // Scales of rows lane % 4 * 2 and the one after; and of lane / 8 * 2 and the one after.
  template <int kTiles>
  __device__ __forceinline__ void begin_block(bool first, int lane, float2 of_sums, float2 of_x,
                                              float (&of_tiles)[kTiles][4]) {
    const float2 larger{fmaxf(sums.x, of_sums.x), fmaxf(sums.y, of_sums.y)};
    const float2 by{__fdividef(sums.x, larger.x), __fdividef(sums.y, larger.y)};
    const float own = lane / 4 % 2 == 0 ? of_x.x : of_x.y;
    x = fmaxf(x, own);
    shrink = __float2half2_rn(__fdividef(own, x));
    sums = larger;
    if (first) return;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) of_tiles[j][i] *= i % 2 == 0 ? by.x : by.y;
    }
  }
};

// Adds a tile times fragments, from the packed words at `tile` in shared memory. `own`: where four tiles are read at
// a time (4 bits), this lane's words of tiles j / 4 * 4 and the three behind. kPacked: values as their definition
// rounds them; else 3inst and mcg as the two halves whose sum they are.
template <int kTileWords, int kCodebook, bool kPacked, int kLoads, int kRowGroups, int kTiles>
__device__ __forceinline__ void multiply_tile(uint32_t tile, int j, uint32_t (&own)[4],
                                              const Window<kTileWords>& window, uint32_t lane_bytes,
                                              const Hash hash, const PowersOfTwo& powers,
                                              const uint2 (&x)[kLoads],
                                              float (&sums)[kRowGroups][kTiles][4]) {
  uint32_t v[3], p[8];
  if constexpr (kTileWords == 64) {
    if (j % 4 == 0) load_matrices(own, tile + lane_bytes);
    v[0] = own[j % 4], v[1] = load_shared(tile + window.index[1]);
  } else {
    load_stretch<kTileWords>([=](int byte) { return load_shared(tile + byte); }, window, v);
  }
  products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
  if constexpr (kPacked) {
    uint32_t a[4];
    packed_values<kCodebook == kMul1>(p, a);
#pragma unroll
    for (int r = 0; r < kLoads; ++r)
      mma_f16(sums[r % kRowGroups][j], a[0], a[1], a[2], a[3], x[r].x, x[r].y);
  } else {
#pragma unroll
    for (uint32_t& product : p) product = halves(product);
#pragma unroll
    for (int r = 0; r < kRowGroups; ++r) {
      mma_f16(sums[r][j], p[0], p[4], p[1], p[5], __byte_perm(x[r].x, 0, 0x1010),
              __byte_perm(x[r].x, 0, 0x3232));
      mma_f16(sums[r][j], p[2], p[6], p[3], p[7], __byte_perm(x[r].y, 0, 0x1010),
              __byte_perm(x[r].y, 0, 0x3232));
    }
  }
}

}  // namespace trellis::cuda
