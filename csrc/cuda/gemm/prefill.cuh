// y for hundreds of rows and more on Hopper: weights are decoded into shared memory, once for every 256
// or 512 rows, while wgmma multiplies what was decoded before. No copy of the decoded matrix exists in
// global memory.
//
// Two launches. `rotate_rows` (rotate.cu) writes H(x * suh) in the swizzled atoms that wgmma reads. Then
// clusters of two blocks take tiles of one column block (128 output features, one Hadamard block) by
// twice kRows rows. Each block multiplies its own kRows rows; it decodes half of the weights, and the
// halves are exchanged.
//
// Roles in a block: two warpgroups multiply, 64 output features each, both operands from shared memory;
// the third decodes, and single lanes of it start all copies. Stages of x and decoded weights go round
// between them, a step of 64 inputs each:
//   full[s]   x has come, this block's half is decoded, the other's has come
//   empty[s]  the multiplying warps of both blocks are done with it
#pragma once

#include "../decode/decode.cuh"
#include "tile.cuh"

namespace trellis::cuda {

template <int kTileWords, int kRows>
struct PrefillShape {
  static constexpr int kThreads = 384;
  static constexpr int kMathWarps = 8, kDecodeWarps = 4;
  static constexpr int kMathRegisters = 208, kDecodeRegisters = 88;  // of 168 each at the start
  // Shared memory in bytes: stages of x, of decoded weights, of packed tiles (half of the column
  // block), rows on their way out, barriers.
  static constexpr int kX = kRows * 128;
  static constexpr int kWeights = 128 * 128, kHalf = kWeights / 2;
  static constexpr int kTileBytes = kTileWords * 2;
  static constexpr int kKTile = 4 * kTileBytes;
  static constexpr int kPacked = kStepTiles * kKTile;
  static constexpr int kPackedStages = 4;
  static constexpr int kOut = kOutRows * kOutStride * 4;
  static constexpr int kFitting =
      (227 * 1024 - kOut - kPackedStages * kPacked - 256) / (kX + kWeights);
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;
  static_assert(kStages >= 3, "wgmma needs a stage, the exchange one, the copies one");
  static constexpr int kBytes = kStages * (kX + kWeights) + kPackedStages * kPacked + kOut + 256;
};

#ifdef TRELLIS_SM90A

template <int kTileWords, int kRows>
struct PrefillMemory {
  using Shape = PrefillShape<kTileWords, kRows>;
  char *x, *weights, *packed;
  float* out;
  uint64_t *full, *empty, *packed_full, *packed_empty;
  int* flag;

  __device__ explicit PrefillMemory(char* base) {
    x = base;
    weights = x + Shape::kStages * Shape::kX;
    packed = weights + Shape::kStages * Shape::kWeights;
    out = reinterpret_cast<float*>(packed + Shape::kPackedStages * Shape::kPacked);
    full = reinterpret_cast<uint64_t*>(reinterpret_cast<char*>(out) + Shape::kOut);
    empty = full + Shape::kStages;
    packed_full = empty + Shape::kStages;
    packed_empty = packed_full + Shape::kPackedStages;
    flag = reinterpret_cast<int*>(packed_empty + Shape::kPackedStages);
  }
};

// Brings packed tiles, one step after the other, through all pieces of a worker.
template <int kTileWords, int kRows>
struct PackedFeed {
  using Shape = PrefillShape<kTileWords, kRows>;
  const Gemm& g;
  const PrefillMemory<kTileWords, kRows>& memory;
  const int rank;
  TileWalk walk;
  Ring ring;
  int step = 0, last = 0;
  uint32_t bytes = 0;

  __device__ PackedFeed(const Gemm& g_, const TileSchedule& schedule, int worker, int rank_,
                        const PrefillMemory<kTileWords, kRows>& memory_)
      : g(g_), memory(memory_), rank(rank_), walk(schedule, worker, 0) {}

  // The next step, if there is one, into the next stage once that is free.
  __device__ void bring() {
    if (step == last) {
      if (!walk.next()) return;
      int row_tile, column;
      walk.locate(row_tile, column);
      step = walk.first, last = walk.last;
      const int64_t first_tile = static_cast<int64_t>(column) * 8 + rank * 4;
      const int64_t left = min(static_cast<int64_t>(4), g.out_tiles - first_tile);
      bytes = static_cast<uint32_t>(max(static_cast<int64_t>(0), left)) * Shape::kTileBytes;
      at = reinterpret_cast<const char*>(g.trellis) + first_tile * Shape::kTileBytes;
    }
    const int64_t row = static_cast<int64_t>(step) * kStepTiles;
    const int k_tiles = static_cast<int>(min(static_cast<int64_t>(kStepTiles), g.in_tiles - row));
    uint64_t* const here = memory.packed_full + ring.stage;
    barrier_wait(memory.packed_empty + ring.stage, ring.parity ^ 1);
    barrier_expect(here, k_tiles * bytes);
    for (int i = 0; i < k_tiles && bytes > 0; ++i)
      copy_bulk(memory.packed + ring.stage * Shape::kPacked + i * Shape::kKTile,
                at + (row + i) * g.out_tiles * Shape::kTileBytes, bytes, here);
    ++step;
    ring.advance<Shape::kPackedStages>();
  }

 private:
  const char* at = nullptr;
};

// The decoding warpgroup: warp w has a tile of 16 output features of this block's half.
template <int kTileWords, bool kMul1, int kRows>
__device__ void prefill_decode(const Gemm& g, const TileScratch& scratch,
                               const TileSchedule& schedule, const Hash& hash,
                               const PowersOfTwo& powers, int worker, int rank,
                               const PrefillMemory<kTileWords, kRows>& memory) {
  using Shape = PrefillShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32 % Shape::kDecodeWarps, lane = hold(threadIdx.x % 32);
  // The copies are shared out, since every warp has as much to decode.
  const bool brings_x = warp == 0 && lane == 0, brings_packed = warp == 1 && lane == 0;
  const Window<kTileWords> window(lane);
  const uint32_t packed_at = hold(shared_address(memory.packed) + warp * Shape::kTileBytes);
  // stmatrix takes the address of a row of eight weights from each lane: matrices 0 and 1 are rows 0..7
  // and 8..15 of a tile's first eight inputs, 2 and 3 those of the second. The atoms are those of
  // rotate.cu: eight rows of 128 bytes, 16-byte piece p of row r at p ^ r.
  const int row = lane % 8, piece = lane / 16 ^ row, half = rank * Shape::kHalf;
  const uint32_t weights_at = hold(shared_address(memory.weights) + half +
                                   (warp * 2 + lane / 8 % 2) * 1024 + row * 128 + piece * 16);
  PackedFeed<kTileWords, kRows> feed(g, schedule, worker, rank, memory);
  // One stage short, so that no warp waits for the slowest to be done with the same stage.
  for (int i = 0; brings_packed && i + 1 < Shape::kPackedStages; ++i) feed.bring();
  // The activations come from the launch in front; the weights above did not have to wait for it.
  if (brings_x) wait_for_previous_kernel();
  const int64_t x_stride = static_cast<int64_t>(scratch.rotated.row_groups) * 1024;

  Ring ring, packed_ring;
  TileWalk walk(schedule, worker, 0);
  while (walk.next()) {
    int row_tile, column;
    walk.locate(row_tile, column);
    const char* x = reinterpret_cast<const char*>(scratch.rotated.x) + walk.first * x_stride +
                    (static_cast<int64_t>(row_tile) * kBlocks + rank) * Shape::kX;
    for (int step = walk.first; step < walk.last; ++step) {
      uint32_t a[kStepTiles][4];
      barrier_wait(memory.packed_full + packed_ring.stage, packed_ring.parity);
      const uint32_t packed = packed_at + packed_ring.stage * Shape::kPacked;
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) {
        uint32_t v[3], p[8];
        const uint32_t tile = packed + i * Shape::kKTile;
        load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
        products<kTileWords, !kMul1>(v, hash, powers, p);
        packed_values<kMul1>(p, a[i]);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.packed_empty + packed_ring.stage);
      if (brings_packed) feed.bring();
      packed_ring.advance<Shape::kPackedStages>();

      barrier_wait(memory.empty + ring.stage, ring.parity ^ 1);
      uint64_t* const full = memory.full + ring.stage;
      if (brings_x) {
        barrier_expect(full, Shape::kX + Shape::kHalf);  // x, and the other block's half
        copy_bulk(memory.x + ring.stage * Shape::kX, x, Shape::kX, full);
        x += x_stride;
      }
      const uint32_t to = weights_at + ring.stage * Shape::kWeights;
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) store_matrices(to ^ i * 32, a[i]);
      // What the tensor cores and the copy below read must be visible to them, from every lane.
      fence_async();
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(full);
        constexpr int kTile = Shape::kHalf / Shape::kDecodeWarps;  // 16 rows of 128 bytes
        copy_to_block(memory.weights + ring.stage * Shape::kWeights + half + warp * kTile, kTile,
                      full, rank ^ 1);
      }
      ring.advance<Shape::kStages>();
    }
  }
}

// The two multiplying warpgroups.
template <int kTileWords, int kRows>
__device__ void prefill_multiply(const Gemm& g, const TileScratch& scratch,
                                 const TileSchedule& schedule, int worker, int rank,
                                 const PrefillMemory<kTileWords, kRows>& memory) {
  using Shape = PrefillShape<kTileWords, kRows>;
  const int lane = threadIdx.x % 32;
  const uint32_t x_at = hold(shared_address(memory.x) / 16);
  const uint32_t weights_at =
      hold((shared_address(memory.weights) + threadIdx.x / 128 * Shape::kHalf) / 16);
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane < 2) barrier_arrive_at(memory.empty + stage, lane);
  };
  wait_for_previous_kernel();  // for the row scales

  Ring ring;
  TileWalk walk(schedule, worker, 0);
  while (walk.next()) {
    float sums[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
    int before = -1;  // the stage of the step before, until the tensor cores are done with it
    for (int step = walk.first; step < walk.last; ++step) {
      barrier_wait(memory.full + ring.stage, ring.parity);
      const uint32_t weights = weights_at + ring.stage * (Shape::kWeights / 16);
      const uint32_t x = x_at + ring.stage * (Shape::kX / 16);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i)  // 16 inputs are 32 bytes, in units of 16
        wgmma_f16<kRows>(sums, wgmma_descriptor(weights + i * 2), wgmma_descriptor(x + i * 2));
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) release(before);
      before = ring.stage;
      ring.advance<Shape::kStages>();
    }
    wgmma_wait<0>();
    release(before);

    int row_tile, column;
    walk.locate(row_tile, column);
    const int64_t first_row = (static_cast<int64_t>(row_tile) * kBlocks + rank) * kRows;
    if (walk.last - walk.first < schedule.steps &&
        !meet<kRows>(scratch, schedule, walk, rank, 1, memory.flag, sums))
      continue;
    finish_tile<kRows>(g, sums, scratch.rotated.row_scales, first_row, column, memory.out, 1);
  }
}

#endif  // TRELLIS_SM90A

template <int kTileWords, bool kMul1, int kRows>
__global__ void __launch_bounds__(PrefillShape<kTileWords, kRows>::kThreads, 1)
    prefill_kernel(const Gemm g, const TileScratch scratch, const TileSchedule schedule,
                   const Hash hash, const PowersOfTwo powers) {
#ifdef TRELLIS_SM90A
  using Shape = PrefillShape<kTileWords, kRows>;
  extern __shared__ __align__(1024) char shared[];  // as swizzled atoms want it
  const PrefillMemory<kTileWords, kRows> memory(shared);
  const int rank = static_cast<int>(cluster_rank());
  const int worker = static_cast<int>(blockIdx.x) / 2;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(memory.full + i, 1 + Shape::kDecodeWarps);  // copies have begun, tiles are there
      barrier_init(memory.empty + i, Shape::kMathWarps * 2);
    }
    for (int i = 0; i < Shape::kPackedStages; ++i) {
      barrier_init(memory.packed_full + i, 1);
      barrier_init(memory.packed_empty + i, Shape::kDecodeWarps);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x / 32 < Shape::kMathWarps) {
    take_registers<Shape::kMathRegisters>();
    prefill_multiply<kTileWords, kRows>(g, scratch, schedule, worker, rank, memory);
  } else {
    give_registers<Shape::kDecodeRegisters>();
    prefill_decode<kTileWords, kMul1, kRows>(g, scratch, schedule, hash, powers, worker, rank,
                                             memory);
  }
  __syncwarp();
  cluster_sync();  // a block's memory must outlive what its neighbour sends there
#endif
}

// One rate's kernels; instantiated in prefill_k*.cu, one file a rate, so that they compile in parallel.
template <int kTileWords>
cudaError_t launch_prefill_rate(const Gemm& g, const TileScratch& scratch,
                                const TileSchedule& schedule, cudaStream_t stream);

}  // namespace trellis::cuda
