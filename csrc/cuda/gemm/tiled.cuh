// y for many rows on GPUs without wgmma: the wide kernel's tiles of 128 rows by two column blocks, with
// mma.sync. Each weight is decoded once for the tile's rows, into the registers from which mma takes it.
//
// A warp has 16 output features and all 128 rows: a lane's eight weights of a packed tile are its own part of
// the A fragment, and x comes from shared memory as B fragments. All warps bring packed tiles and x, a step
// of 64 inputs at a time, into a ring of stages by asynchronous copies. What a tile's sums go through is in
// tile.cuh.
#pragma once

#include "../decode/decode.cuh"
#include "tile.cuh"

namespace trellis::cuda {

constexpr int kTiledRows = 128;

template <int kTileWords>
struct TiledShape {
  static constexpr int kWarps = kBlocks * 8;
  static constexpr int kThreads = kWarps * 32;
  static constexpr int kTileBytes = kTileWords * 2;
  static constexpr int kKTile = kBlocks * 8 * kTileBytes;
  // Of a stage: atoms of 8 rows by 64 inputs, then packed tiles.
  static constexpr int kX = kTiledRows * 128;
  static constexpr int kStage = kX + kStepTiles * kKTile;
  // Two where three would not fit the 99 KiB that a block may have on 8.6, 8.9 and 12.0.
  static constexpr int kStages = 3 * kStage + 16 <= 99 * 1024 ? 3 : 2;
  // Rows leave through the stages' place.
  static constexpr int kOutFloats = out_floats(out_rows(kTiledRows));  // of a column block
  static constexpr int kOutBytes = kBlocks * kOutFloats * 4;
  static constexpr int kBytes = (kStages * kStage > kOutBytes ? kStages * kStage : kOutBytes) + 16;
};

template <int kTileWords, int kCodebook>
__global__ void __launch_bounds__(TiledShape<kTileWords>::kThreads, 1)
    tiled_kernel(const Gemm g, const TileScratch scratch, const TileSchedule schedule,
                 const PowersOfTwo powers) {
  using Shape = TiledShape<kTileWords>;
  constexpr int kStages = Shape::kStages;
  extern __shared__ __align__(1024) char stages[];
  float* const out = reinterpret_cast<float*>(stages);
  int* const flags = reinterpret_cast<int*>(stages + Shape::kBytes - 16);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, in_block = warp / 8;
  const Window<kTileWords> window(lane);
  const Hash hash = hash_for<kCodebook>();
  const int64_t row_bytes = g.out_tiles * Shape::kTileBytes;
  const int64_t x_stride = static_cast<int64_t>(scratch.rotated.row_groups) * 1024;
  // This lane's address of the four matrices that it loads at a time: row group, half of a k tile.
  const int matrix = lane / 8, row = lane % 8;
  wait_for_previous_kernel();

  TileWalk walk(schedule, static_cast<int>(blockIdx.x), 0);
  while (walk.next()) {
    int row_tile, column;
    locate(schedule, walk.tile, row_tile, column);
    const int64_t first_tile = static_cast<int64_t>(column) * kBlocks * 8;
    const int bytes = static_cast<int>(
        min(static_cast<int64_t>(kBlocks * 8), g.out_tiles - first_tile) * Shape::kTileBytes);
    const char* const all_packed =
        reinterpret_cast<const char*>(g.trellis) + first_tile * Shape::kTileBytes;
    const char* const all_x = reinterpret_cast<const char*>(scratch.rotated.x) +
                              static_cast<int64_t>(row_tile) * Shape::kX;
    const auto bring = [&](int step) {
      if (step < walk.last) {
        char* const to = stages + (step - walk.first) % kStages * Shape::kStage;
        const char* const x = all_x + step * x_stride;
#pragma unroll
        for (int at = 0; at < Shape::kX; at += Shape::kThreads * 16)
          copy_async_16(to + at + threadIdx.x * 16, x + at + threadIdx.x * 16);
        const int k_tiles =
            static_cast<int>(min(static_cast<int64_t>(kStepTiles),
                                 g.in_tiles - static_cast<int64_t>(step) * kStepTiles));
        for (int at = threadIdx.x * 16; at < k_tiles * Shape::kKTile; at += Shape::kThreads * 16) {
          const int k_tile = at / Shape::kKTile, within = at - k_tile * Shape::kKTile;
          if (within < bytes)
            copy_async_16(to + Shape::kX + at,
                          all_packed +
                              (static_cast<int64_t>(step) * kStepTiles + k_tile) * row_bytes +
                              within);
        }
      }
      copy_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) bring(walk.first + i);

    float sums[kTiledRows / 2] = {};
    for (int step = walk.first; step < walk.last; ++step) {
      copy_wait<kStages - 2>();
      __syncthreads();  // everybody's copies are there, and the stage before is done with
      bring(step + kStages - 1);
      const char* const stage = stages + (step - walk.first) % kStages * Shape::kStage;
      const uint32_t x = shared_address(stage);
      const uint32_t packed = x + Shape::kX + warp * Shape::kTileBytes;
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) {
        uint32_t v[3], p[8], a[4];
        const uint32_t tile = packed + i * Shape::kKTile;
        load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
        products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
        packed_values<kCodebook == kMul1>(p, a);
        // 16-byte piece p of row r of an atom lies at piece p ^ r.
        const uint32_t from = x + matrix / 2 * 1024 + row * 128 + ((i * 2 + matrix % 2) ^ row) * 16;
#pragma unroll
        for (int pair = 0; pair < kTiledRows / 16; ++pair) {
          uint32_t b[4];
          load_matrices(b, from + pair * 2048);
          auto& first = *reinterpret_cast<float (*)[4]>(sums + pair * 8);
          auto& second = *reinterpret_cast<float (*)[4]>(sums + pair * 8 + 4);
          mma_f16(first, a[0], a[1], a[2], a[3], b[0], b[1]);
          mma_f16(second, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
    const OutVectors<kTiledRows> vectors(g, scratch, row_tile, column * kBlocks + in_block);
    copy_wait<0>();
    __syncthreads();  // the stages are done with

    if ((static_cast<int64_t>(column) * kBlocks + in_block) * 8 < g.out_tiles)
      finish_piece<kTiledRows>(g, scratch, schedule, walk, row_tile, column, in_block, vectors,
                               sums, out + in_block * Shape::kOutFloats, 1 + in_block,
                               flags + in_block);
    __syncthreads();
  }
}

// One rate's kernels; instantiated in tiled_k*.cu, one file a rate, so that they compile in parallel.
template <int kTileWords>
cudaError_t launch_tiled_rate(const Gemm& g, const TileScratch& scratch,
                              const TileSchedule& schedule, cudaStream_t stream);

}  // namespace trellis::cuda
