// The tiles of many rows on Hopper where experts have a hundred rows and more: as wide_tiles.cuh, with up to 256 rows, so
// that most experts are decoded once. Two warpgroups decode and multiply, which is all that the registers of a
// multiprocessor have room for; a third brings packed tiles and rows into a ring of stages and is ahead of them, also
// from tile to tile.
#pragma once

#include "tile_decoder.cuh"

namespace trellis::cuda {

constexpr int kTallThreads = kTileWarps * 32 + 128;

template <int kTerms>
struct TallShape {
  // Bytes of a stage, which has room for any rate: rows, then packed tiles.
  static constexpr int kX = kTallGroups * 1024 * kTerms;
  static constexpr int kStage = kX + kTileSteps * 8 * 256;
  static constexpr int kStages = (227 * 1024 - 256) / kStage;
  static constexpr int kBytes = kStages * kStage + 256;  // the barriers behind
  static_assert(kStages >= 3, "one is multiplied, one may still be read, one is on its way");
};

#ifdef TRELLIS_SM90A

// The copying warpgroup, a lane of each of its warps: warp w brings k tile w of a step, and the last one the rows.
template <bool kDown, int kTerms>
__device__ void bring_tiles(const Moe& m, const MoeScratch& s, char* stages, uint64_t* full,
                            uint64_t* empty) {
  using Shape = TallShape<kTerms>;
  static_assert(kTileSteps == 4, "a warp for each k tile of a step");
  const int warp = static_cast<int>(threadIdx.x) / 32 - kTileWarps;
  const bool brings_x = warp == kTileSteps - 1;
  const uint64_t policy = evict_normally();
  const Tiles<kDown> tiles(m, s);
  Ring ring;
  for (int at = static_cast<int>(blockIdx.x); at < tiles.total; at += static_cast<int>(gridDim.x)) {
    const TileItem item = tiles.at(m, s, kTerms, at);
    const uint32_t bytes = static_cast<uint32_t>(item.tile_words) * 16;
    const uint32_t x_bytes = static_cast<uint32_t>((item.rows + 7) / 8) * kTerms * 1024;
    const char* packed = item.packed + warp * item.row_bytes;
    const char* x = item.x;
    for (int step = 0; step < item.steps; ++step) {
      char* const to = stages + ring.stage * Shape::kStage;
      uint64_t* const here = full + ring.stage;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      barrier_expect(here, bytes + (brings_x ? x_bytes : 0));
      copy_bulk(to + Shape::kX + warp * bytes, packed, bytes, here, policy);
      if (brings_x) copy_bulk(to, x, x_bytes, here, policy);
      packed += kTileSteps * item.row_bytes;
      x += item.step_bytes;
      ring.advance<Shape::kStages>();
    }
  }
}

// kRows: of the tile, at most.
template <int kTerms, int kRows>
__device__ __forceinline__ void multiply_tall_tile(const TileItem& item, const PowersOfTwo& powers,
                                                   const char* stages, uint64_t* full,
                                                   uint64_t* empty, Ring& ring,
                                                   float (&sums)[kRows / 2]) {
  using Shape = TallShape<kTerms>;
  const TileDecoder<Shape::kX> decoder(item);
  const uint32_t first_stage = hold(shared_address(stages));
#pragma unroll
  for (float& sum : sums) sum = 0.0f;
  int before = -1;  // the stage of the step before, until the tensor cores are done with it
  for (int step = 0; step < item.steps; ++step) {
    barrier_wait(full + ring.stage, ring.parity);
    const uint32_t stage = first_stage + ring.stage * Shape::kStage;
    multiply_step<kTerms, kRows>(decoder, stage, powers, sums, [&] {
      if (before >= 0) barrier_arrive(empty + before);
    });
    before = ring.stage;
    ring.advance<Shape::kStages>();
  }
  wgmma_wait<0>();
  barrier_arrive(empty + before);
}

template <bool kDown, int kTerms>
__device__ __forceinline__ void multiply_tiles(const Moe& m, const MoeScratch& s,
                                               const PowersOfTwo& powers, const char* stages,
                                               uint64_t* full, uint64_t* empty) {
  const Tiles<kDown> tiles(m, s);
  Ring ring;
  for (int at = static_cast<int>(blockIdx.x); at < tiles.total; at += static_cast<int>(gridDim.x)) {
    const TileItem item = tiles.at(m, s, kTerms, at);
    const auto multiply = [&](auto rows) {
      float sums[rows.value / 2];
      multiply_tall_tile<kTerms, rows.value>(item, powers, stages, full, empty, ring, sums);
      write_tile(item, sums);
    };
    if (item.rows <= 64)
      multiply(std::integral_constant<int, 64>{});
    else if (item.rows <= 128)
      multiply(std::integral_constant<int, 128>{});
    else if (item.rows <= 192)
      multiply(std::integral_constant<int, 192>{});
    else
      multiply(std::integral_constant<int, kTallGroups * 8>{});
  }
}

#endif  // TRELLIS_SM90A

template <bool kDown, int kTerms>
__global__ void __launch_bounds__(kTallThreads, 1)
    tall_tile_kernel(const Moe m, const MoeScratch s, const PowersOfTwo powers) {
#ifdef TRELLIS_SM90A
  using Shape = TallShape<kTerms>;
  extern __shared__ __align__(1024) char tall_stages[];  // as swizzled atoms want it
  uint64_t* const full = reinterpret_cast<uint64_t*>(tall_stages + Shape::kStages * Shape::kStage);
  uint64_t* const empty = full + Shape::kStages;
  let_next_kernel_start();
  if (threadIdx.x == 0) {
    // All lanes of the warps that multiply arrive, as in wide.cuh.
    for (int i = 0; i < Shape::kStages; ++i)
      barrier_init(full + i, kTileSteps), barrier_init(empty + i, kTileWarps * 32);
    barrier_init_fence();
  }
  __syncthreads();
  wait_for_previous_kernel();
  if (threadIdx.x / 32 >= kTileWarps) {
    give_registers<40>();
    if (threadIdx.x % 32 == 0) bring_tiles<kDown, kTerms>(m, s, tall_stages, full, empty);
  } else {
    take_registers<232>();
    multiply_tiles<kDown, kTerms>(m, s, powers, tall_stages, full, empty);
  }
#endif
}

}  // namespace trellis::cuda
