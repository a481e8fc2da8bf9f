// y for more than 32 rows on Hopper: each weight is decoded once for a tile of 64, 128 or 256 rows,
// straight into the registers from which wgmma takes it. No copy of the decoded matrix exists anywhere.
//
// Two launches. rotate.cu writes H(x * suh) in the swizzled atoms that wgmma reads. Then workers take tiles
// of two column blocks (128 output features, one Hadamard block, each) by kRows rows. With up to 128 rows a
// worker is one block with four warpgroups; with 256 rows it is a cluster of two blocks, each with two
// warpgroups and one of the column blocks, which share every load of x.
//
// Roles: the last warpgroup, a lane of each warp, brings packed tiles and x, a step of 64 inputs at a time,
// into a ring of stages by bulk copies, of which one lane could not issue enough; the others decode and
// multiply. Weights are the A operand: warp w of a warpgroup decodes one tile of 16 output features, and a
// lane's eight weights of a tile are its own part of the fragment. While the tensor cores work on some k
// tiles, the warp decodes the next.
//
// What a tile's sums go through: where tiles are few, the blocks of a cluster take slices of one tile's
// steps, and each adds and finishes a share of the rows, which it reads from the others' shared memory.
// Otherwise a tile that lies in several stretches leaves its sums in scratch, and the blocks that share it
// add the parts, a share of the rows each, or the last to come all (tile.cuh). The order of additions is
// fixed in both.
#pragma once

#include "../decode/decode.cuh"
#include "tile.cuh"

namespace trellis::cuda {

template <int kTileWords, int kRows>
struct WideShape {
  static constexpr int kCluster = kRows == 256 ? 2 : 1;
  static constexpr int kColumnBlocks = kBlocks / kCluster;  // of one thread block
  static constexpr int kMathWarps = kColumnBlocks * 8;
  static constexpr int kThreads = kMathWarps * 32 + 128;
  // k tiles that a warp decodes while the tensor cores work on as many. With one ptxas 13.0 could not keep
  // the two apart and waited for each product (its remark C7513).
  static constexpr int kGroup = 2;
  static_assert(kStepTiles / kGroup % 2 == 0, "the two halves take turns, also from step to step");
  // The copying warpgroup gives its registers to the others.
  static constexpr int kCopyRegisters = kRows == 256 ? 40 : 32;
  static constexpr int kMathRegisters = kRows == 256 ? 232 : 112;
  // Shared memory in bytes: stages of x, stages of packed tiles, rows on their way out, barriers.
  static constexpr int kX = kRows * 128;
  static constexpr int kTileBytes = kTileWords * 2;
  static constexpr int kKTile = kColumnBlocks * 8 * kTileBytes;
  static constexpr int kPacked = kStepTiles * kKTile;
  static constexpr int kOutFloats = out_floats(out_rows(kRows));  // of a column block
  static constexpr int kOut = kColumnBlocks * kOutFloats * 4;
  static constexpr int kFitting = (227 * 1024 - kOut - 256) / (kX + kPacked);
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static_assert(kCluster > 1 || kStages * (kX + kPacked) + kOut >= kBlocks * kRows * kOutStride * 4,
                "the sums of a slice take the place of the stages and what follows them");
  static constexpr int kBytes = kStages * (kX + kPacked) + kOut + 256;
};

#ifdef TRELLIS_SM90A

// The copying warpgroup, a lane of each of its warps: warp w brings k tile w of a step, and the last one x.
template <int kTileWords, int kRows>
__device__ void wide_bring(const Gemm& g, const TileScratch& scratch, const TileSchedule& schedule,
                           int worker, int slice, int rank, char* x_stages, char* packed_stages,
                           uint64_t* full, uint64_t* empty) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32 - Shape::kMathWarps;
  static_assert(kStepTiles == 4, "a warp for each k tile of a step");
  const int64_t row_bytes = g.out_tiles * Shape::kTileBytes;
  const int own_steps = static_cast<int>((g.in_tiles - warp + kStepTiles - 1) / kStepTiles);
  Ring ring;
  TileWalk walk(schedule, worker, slice);
  bool waited = false;
  // Later row tiles read the weights again.
  const uint64_t weights_policy = schedule.row_tiles == 1 ? evict_first() : evict_normally();
  const uint64_t x_policy = evict_normally();
  while (walk.next()) {
    int row_tile, column;
    locate(schedule, walk.tile, row_tile, column);
    const int64_t first_tile =
        (static_cast<int64_t>(column) * kBlocks + rank * Shape::kColumnBlocks) * 8;
    const int64_t tiles =
        min(static_cast<int64_t>(Shape::kColumnBlocks * 8), g.out_tiles - first_tile);
    const uint32_t bytes = tiles > 0 ? static_cast<uint32_t>(tiles) * Shape::kTileBytes : 0;

    const char* packed = reinterpret_cast<const char*>(g.trellis) + first_tile * Shape::kTileBytes +
                         (static_cast<int64_t>(walk.first) * kStepTiles + warp) * row_bytes;
    const int64_t x_stride = static_cast<int64_t>(scratch.rotated.row_groups) * 1024;
    const char* x = reinterpret_cast<const char*>(scratch.rotated.x) + walk.first * x_stride +
                    static_cast<int64_t>(row_tile) * Shape::kX;
    for (int step = walk.first; step < walk.last; ++step) {
      uint64_t* const here = full + ring.stage;
      const uint32_t mine = step < own_steps ? bytes : 0;
      const bool brings_x = warp == kStepTiles - 1;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      // Whoever has nothing to bring arrives as well: else it might miss a turn of the ring, and wait for ever.
      barrier_expect(here, mine + (brings_x ? Shape::kX : 0));
      if (mine > 0)
        copy_bulk(packed_stages + ring.stage * Shape::kPacked + warp * Shape::kKTile, packed, mine,
                  here, weights_policy);
      if (brings_x) {
        // The activations come from the launch in front; the weights did not have to wait for it.
        if (!waited) wait_for_previous_kernel();
        waited = true;
        char* const to = x_stages + ring.stage * Shape::kX;
        if constexpr (Shape::kCluster == 1) {
          copy_bulk(to, x, Shape::kX, here, x_policy);
        } else {
          constexpr int kPart = Shape::kX / Shape::kCluster;
          copy_bulk_multicast(to + rank * kPart, x + rank * kPart, kPart, here,
                              (1 << Shape::kCluster) - 1);
        }
      }

      packed += kStepTiles * row_bytes;
      x += x_stride;
      ring.advance<Shape::kStages>();
    }
  }
}

// A slice of a tile: leaves its sums in shared memory, all column blocks and rows, for wide_gather.
template <int kTileWords, int kRows>
__device__ __forceinline__ void wide_leave(const float (&sums)[kRows / 2], float* all) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The sums take the place of the stages, with which every warp is done then.
  named_barrier(3, Shape::kMathWarps * 32);
  float* const block = all + warp / 8 * kRows * kOutStride + warp % 8 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float* const at = block + (8 * j + lane % 4 * 2) * kOutStride;
    at[0] = sums[4 * j], at[kOutStride] = sums[4 * j + 1];
    at[8] = sums[4 * j + 2], at[kOutStride + 8] = sums[4 * j + 3];
  }
}

// Adds the slices' sums for this block's share of the rows, in order, and finishes them.
template <int kTileWords, int kRows>
__device__ __forceinline__ void wide_gather(const Gemm& g, const TileScratch& scratch,
                                            const TileSchedule& schedule, int tile, int slice,
                                            const float* all) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int row_tile, column;
  locate(schedule, tile, row_tile, column);
  const int rows = kRows / schedule.slices;
  for (int i = warp; i < rows * kBlocks; i += Shape::kMathWarps) {
    const int row_in_tile = slice * rows + i / kBlocks, block_in_tile = i % kBlocks;
    const int64_t row = static_cast<int64_t>(row_tile) * kRows + row_in_tile;
    const int64_t column_block = static_cast<int64_t>(column) * kBlocks + block_in_tile;
    if (row >= g.m || column_block * 8 >= g.out_tiles) continue;
    const float* const at = all + (block_in_tile * kRows + row_in_tile) * kOutStride + lane * 4;
    float z[4] = {};
    for (int other = 0; other < schedule.slices; ++other) {
      float part[4];
      load_from_block(at, other, part);
#pragma unroll
      for (int j = 0; j < 4; ++j) z[j] += part[j];
    }
    finish_row(g, z, row, column_block * 128, scratch.rotated.row_scales[row]);
  }
}

// One of the warps that decode and multiply.
template <int kTileWords, int kCodebook, int kRows>
__device__ void wide_multiply(const Gemm& g, const TileScratch& scratch,
                              const TileSchedule& schedule, const PowersOfTwo& powers, int worker,
                              int slice, int rank, char* x_stages, const char* packed_stages,
                              float* out, int* flags, uint64_t* full, uint64_t* empty) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = hold(threadIdx.x % 32);
  const int in_block = warp / 8;  // which of the block's column blocks, and of the tile's
  const int in_tile = rank * Shape::kColumnBlocks + in_block;

  const Window<kTileWords> window(lane);
  const Hash hash = hash_for<kCodebook>();
  // Every lane arrives: racecheck does not see what lanes have agreed on before one of them does, and this is as fast.
  const auto release = [&](int stage) {
    if constexpr (Shape::kCluster == 1) {
      barrier_arrive(empty + stage);
    } else {
#pragma unroll
      for (int block = 0; block < Shape::kCluster; ++block) barrier_arrive_at(empty + stage, block);
    }
  };
  const uint32_t packed_at = hold(shared_address(packed_stages) + warp * Shape::kTileBytes);
  const uint32_t x_at = hold(shared_address(x_stages) / 16);
  wait_for_previous_kernel();  // for the row scales

  Ring ring;
  TileWalk walk(schedule, worker, slice);
  while (walk.next()) {
    float sums[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
    int before = -1;  // the stage of the step before, until the tensor cores are done with it
    for (int step = walk.first; step < walk.last; ++step) {
      barrier_wait(full + ring.stage, ring.parity);
      const uint32_t packed = packed_at + ring.stage * Shape::kPacked;
      const uint32_t x = x_at + ring.stage * (Shape::kX / 16);
      uint32_t a[2][Shape::kGroup][4];  // half is decoded into while the tensor cores use the other
#pragma unroll
      for (int first = 0; first < kStepTiles; first += Shape::kGroup) {
        auto& fragments = a[first / Shape::kGroup % 2];
#pragma unroll
        for (int i = 0; i < Shape::kGroup; ++i) {
          uint32_t v[3], p[8];
          const uint32_t tile = packed + (first + i) * Shape::kKTile;
          load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window,
                                   v);
          products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
          packed_values<kCodebook == kMul1>(p, fragments[i]);
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < Shape::kGroup; ++i)  // 16 inputs are 32 bytes, in units of 16
          wgmma_f16<kRows>(sums, fragments[i], wgmma_descriptor(x + (first + i) * 2, 1024));
        wgmma_commit();
        wgmma_wait<1>();
        if (first == 0 && before >= 0) release(before);
      }
      before = ring.stage;
      ring.advance<Shape::kStages>();
    }
    int row_tile, column;
    locate(schedule, walk.tile, row_tile, column);
    const OutVectors<kRows> vectors(g, scratch, row_tile, column * kBlocks + in_tile);
    wgmma_wait<0>();
    release(before);
    if (Shape::kCluster == 1 && schedule.slices > 1) {
      wide_leave<kTileWords, kRows>(sums, reinterpret_cast<float*>(x_stages));
      return;
    }
    if ((static_cast<int64_t>(column) * kBlocks + in_tile) * 8 >= g.out_tiles) continue;
    finish_piece<kRows>(g, scratch, schedule, walk, row_tile, column, in_tile, vectors, sums,
                        out + in_block * Shape::kOutFloats, 1 + in_block, flags + in_block);
  }
}

#endif  // TRELLIS_SM90A

template <int kTileWords, int kCodebook, int kRows>
__global__ void __launch_bounds__(WideShape<kTileWords, kRows>::kThreads, 1)
    wide_kernel(const Gemm g, const TileScratch scratch, const TileSchedule schedule,
                const PowersOfTwo powers) {
#ifdef TRELLIS_SM90A
  using Shape = WideShape<kTileWords, kRows>;
  extern __shared__ __align__(1024) char x_stages[];  // as swizzled atoms want it
  char* const packed_stages = x_stages + Shape::kStages * Shape::kX;
  float* const out = reinterpret_cast<float*>(packed_stages + Shape::kStages * Shape::kPacked);
  uint64_t* const full = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(out) + Shape::kOut);
  uint64_t* const empty = full + Shape::kStages;
  int* const flags = reinterpret_cast<int*>(empty + Shape::kStages);

  const int in_cluster = static_cast<int>(cluster_rank());
  const int rank = Shape::kCluster == 1 ? 0 : in_cluster;
  const int slice = Shape::kCluster == 1 ? in_cluster : 0;
  const int worker = static_cast<int>(blockIdx.x) / schedule.cluster;

  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(full + i, kStepTiles);  // the warps that copy
      barrier_init(empty + i, Shape::kMathWarps * 32 * Shape::kCluster);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Shape::kCluster > 1) cluster_sync();

  if (threadIdx.x / 32 >= Shape::kMathWarps) {
    give_registers<Shape::kCopyRegisters>();
    if (threadIdx.x % 32 == 0)
      wide_bring<kTileWords, kRows>(g, scratch, schedule, worker, slice, rank, x_stages,
                                    packed_stages, full, empty);
  } else {
    take_registers<Shape::kMathRegisters>();
    wide_multiply<kTileWords, kCodebook, kRows>(g, scratch, schedule, powers, worker, slice, rank,
                                                x_stages, packed_stages, out, flags, full, empty);
  }
  __syncwarp();
  if constexpr (Shape::kCluster == 1) {
    if (schedule.slices == 1) return;
    cluster_sync();
    if (threadIdx.x / 32 < Shape::kMathWarps)
      wide_gather<kTileWords, kRows>(g, scratch, schedule, worker, slice,
                                     reinterpret_cast<const float*>(x_stages));
    __syncwarp();
  }
  cluster_sync();  // a block's memory must outlive what its neighbours send there or read
#endif
}

// One rate's kernels; instantiated in wide_k*.cu, one file a rate, so that they compile in parallel.
template <int kTileWords>
cudaError_t launch_wide_rate(const Gemm& g, const TileScratch& scratch,
                             const TileSchedule& schedule, cudaStream_t stream);

}  // namespace trellis::cuda
