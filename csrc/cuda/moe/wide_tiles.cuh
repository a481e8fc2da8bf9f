// The tiles of many rows on Hopper: as in tiles.cuh, multiplied by wgmma in the manner of ../gemm/wide.cuh. Two
// blocks a multiprocessor, so that one multiplies while the sums of the other leave. Rows that a tile does not
// have are whatever lay in shared memory: their sums go nowhere. A tile of at most 64 rows is multiplied as one.
#pragma once

#include "../common/hopper.cuh"
#include "tiles.cuh"

namespace trellis::cuda {

// One is multiplied, one is what the tensor cores may still be at, and the others are on their way.
template <int kTerms>
constexpr int kWideTileStages = kTerms == 1 ? 4 : 2;
template <int kTerms>
constexpr int kWideTileShared = kWideTileStages<kTerms> * kTileStage<kTerms>;

#ifdef TRELLIS_SM90A

__device__ __forceinline__ int kind_of(int tile_words, int codebook) {
  return codebook * 15 + tile_words / 8 - 2;
}
// f(rate, codebook), both known at compile time, by one jump: what with_rate and with_codebook do by two.
template <typename F>
__device__ __forceinline__ void with_kind(int kind, F f) {
#define TRELLIS_KIND(words, codebook) \
  case codebook * 15 + words / 8 - 2: \
    return f(std::integral_constant<int, words>{}, std::integral_constant<int, codebook>{});
#define TRELLIS_KINDS(codebook) \
  TRELLIS_KIND(16, codebook)    \
  TRELLIS_KIND(32, codebook)    \
  TRELLIS_KIND(48, codebook)    \
  TRELLIS_KIND(64, codebook)    \
  TRELLIS_KIND(80, codebook)    \
  TRELLIS_KIND(96, codebook) TRELLIS_KIND(112, codebook) TRELLIS_KIND(128, codebook)
  switch (kind) {
    TRELLIS_KINDS(kInst3)
    TRELLIS_KINDS(kMcg)
    TRELLIS_KINDS(kMul1)
    TRELLIS_KIND(24, kMul1)
    TRELLIS_KIND(40, kMul1)
    TRELLIS_KIND(56, kMul1)
  }
#undef TRELLIS_KINDS
#undef TRELLIS_KIND
}

// kRows: of the tile, at most. The rate is chosen around decoding alone: ptxas waits for each wgmma in a
// function that is called (its remark C7510) and in one that holds the loop for every rate (C7512).
template <int kTerms, int kRows>
__device__ __forceinline__ void multiply_wide_tile(const TileItem& item, const PowersOfTwo& powers,
                                                   char* stages, float (&sums)[kRows / 2]) {
  constexpr int kStages = kWideTileStages<kTerms>;
  constexpr int kGroup = 2;  // k tiles that are decoded while as many are multiplied
  // Steps whose copies are under way. The stage before the one that is multiplied is left alone if there are
  // enough, as the tensor cores may still read it.
  constexpr int kAhead = kStages > 2 ? kStages - 2 : 1;
  const int lane = threadIdx.x % 32, tile_words = item.tile_words;
  const int kind = hold(static_cast<uint32_t>(kind_of(tile_words, item.codebook)));
  int byte[3], skew;  // of the lane's words in a packed tile
  with_rate(tile_words, [&](auto rate) TRELLIS_INLINE_LAMBDA {
    const Window<rate.value> window(lane);
#pragma unroll
    for (int i = 0; i < 3; ++i) byte[i] = window.index[i] * 4;
    skew = window.skew;
  });
  const uint32_t packed_at = hold(kTileX<kTerms> + threadIdx.x / 32 * tile_words * 2);
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
    uint32_t a[2][kGroup][4];
#pragma unroll
    for (int first = 0; first < kTileSteps; first += kGroup) {
      auto& fragments = a[first / kGroup];
      with_kind(kind, [&](auto rate, auto codebook) TRELLIS_INLINE_LAMBDA {
        constexpr int kTileWords = rate.value, kCodebook = codebook.value;
        const Hash hash = hash_for<kCodebook>();
        Window<kTileWords> window(0);
#pragma unroll
        for (int i = 0; i < 3; ++i) window.index[i] = byte[i];
        window.skew = skew;
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
          uint32_t v[3], p[8];
          const uint32_t tile = stage + packed_at + (first + i) * kTileWords * 16;
          load_stretch<kTileWords>([=](int at) { return load_shared(tile + at); }, window, v);
          products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
          packed_values<kCodebook == kMul1>(p, fragments[i]);
        }
      });
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
#pragma unroll
        for (int term = 0; term < kTerms; ++term)  // an atom is 64 units of 16 bytes
          wgmma_f16<kRows>(
              sums, fragments[i],
              wgmma_descriptor(stage / 16 + (first + i) * 2 + term * 64, kTerms * 1024));
      }
      wgmma_commit();
      wgmma_wait<1>();
    }
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

// Both products; instantiated in wide_tiles_*.cu.
template <int kTerms>
cudaError_t launch_wide_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream);

}  // namespace trellis::cuda
