// The tiles of many rows on Hopper: as in tiles.cuh, multiplied by wgmma in the manner of ../gemm/wide.cuh. Two
// blocks a multiprocessor, so that one multiplies while the sums of the other leave. Rows that a tile does not
// have are whatever lay in shared memory: their sums go nowhere. A tile of at most 64 rows is multiplied as one.
#pragma once

#include "tile_decoder.cuh"

namespace trellis::cuda {

// One is multiplied, one is what the tensor cores may still be at, and the others are on their way.
template <int kTerms>
constexpr int kWideTileStages = kTerms == 1 ? 4 : 2;
template <int kTerms>
constexpr int kWideTileShared = kWideTileStages<kTerms> * kTileStage<kTerms>;

#ifdef TRELLIS_SM90A

// kRows: of the tile, at most.
template <int kTerms, int kRows>
__device__ __forceinline__ void multiply_wide_tile(const TileItem& item, const PowersOfTwo& powers,
                                                   char* stages, float (&sums)[kRows / 2]) {
  constexpr int kStages = kWideTileStages<kTerms>;
  // Steps whose copies are under way. The stage before the one that is multiplied is left alone if there are
  // enough, as the tensor cores may still read it.
  constexpr int kAhead = kStages > 2 ? kStages - 2 : 1;
  const TileDecoder<kTileX<kTerms>> decoder(item);
  TileCopies<kTerms, kStages> copies(item, stages);
#pragma unroll 1
  for (int i = 0; i < kAhead; ++i) copies.bring();

#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  uint32_t stage = copies.first_stage;
  for (int step = 0; step < item.steps; ++step, stage = copies.next(stage)) {
    copy_wait<kAhead - 1>();
    copies_before_wgmma();
    if constexpr (kStages == 2) wgmma_wait<0>();
    __syncthreads();  // everybody's copies are there, and the stage that is filled next is done with
    copies.bring();
    multiply_step<kTerms, kRows>(decoder, stage, powers, sums, [] {});
  }
  wgmma_wait<0>();
  copy_wait<0>();
  __syncthreads();  // before the next tile's copies
}

#endif  // TRELLIS_SM90A

template <bool kDown, int kTerms>
__global__ void __launch_bounds__(kTileWarps * 32, 2)
    wide_tile_kernel(const Moe m, const MoeScratch s, const PowersOfTwo powers) {
#ifdef TRELLIS_SM90A
  extern __shared__ __align__(1024) char wide_stages[];  // as swizzled atoms want it
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Tiles<kDown> tiles(m, s);
  for (int at = static_cast<int>(blockIdx.x); at < tiles.total; at += static_cast<int>(gridDim.x)) {
    const TileItem item = tiles.at(m, s, kTerms, at);
    if (item.rows <= 64) {
      float sums[32];
      multiply_wide_tile<kTerms, 64>(item, powers, wide_stages, sums);
      write_tile(item, sums);
    } else {
      float sums[64];
      multiply_wide_tile<kTerms, 128>(item, powers, wide_stages, sums);
      write_tile(item, sums);
    }
  }
#endif
}

}  // namespace trellis::cuda
