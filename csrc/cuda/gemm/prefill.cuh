// y for hundreds of rows and more on Hopper: weights are decoded into shared memory, once for every 256
// or 512 rows, while wgmma multiplies what was decoded before. No copy of the decoded matrix exists in
// global memory.
//
// Two launches. `rotate_rows` (rotate.cu) writes H(x * suh) in the swizzled atoms that wgmma reads. Then
// clusters of two blocks take tiles of one column block (128 output features, one Hadamard block) by
// twice kRows rows. Each block multiplies its own kRows rows; it decodes half of each step's inputs, and
// the halves are exchanged.
//
// Roles in a block: eight warps decode and multiply, in two warpgroups of 64 output features each, with
// both operands in shared memory; while the tensor cores work on a step, they decode for the one after
// the next. One lane of the third warpgroup starts the copies of packed tiles and x. Stages go round, a
// step of 64 inputs each:
//   full[s]   x has come, this block's half is decoded, the other's has come
//   empty[s]  the warps of both blocks are done with it
// and stages of packed tiles likewise, within a block.
#pragma once

#include "../decode/decode.cuh"
#include "tile.cuh"

namespace trellis::cuda {

constexpr int kHalfTiles = kStepTiles / 2;  // k tiles of a step that a block decodes
constexpr int kAhead = 2;                   // steps that are decoded ahead of those multiplied

template <int kTileWords, int kRows>
struct PrefillShape {
  static constexpr int kMathWarps = 8;
  static constexpr int kThreads = kMathWarps * 32 + 128;
  static constexpr int kMathRegisters = 232, kCopyRegisters = 40;  // of 168 each at the start
  // Shared memory in bytes: stages of x, of decoded weights (two halves of 128 rows of 64 bytes), of
  // packed tiles, rows on their way out, barriers.
  static constexpr int kX = kRows * 128;
  static constexpr int kHalf = 128 * kHalfTiles * 32, kWeights = 2 * kHalf;
  static constexpr int kTileBytes = kTileWords * 2;
  static constexpr int kKTile = 8 * kTileBytes;
  static constexpr int kPacked = kHalfTiles * kKTile;
  static constexpr int kPackedStages = 4;
  static constexpr int kOut = kOutRows * kOutStride * 4;
  static constexpr int kFitting =
      (227 * 1024 - kOut - kPackedStages * kPacked - 256) / (kX + kWeights);
  static constexpr int kStages = kFitting < 6 ? kFitting : 6;
  static_assert(kStages > kAhead + 1, "stages for wgmma and for what is decoded ahead");
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

// The copying warpgroup: one lane of it.
template <int kTileWords, int kRows>
__device__ void prefill_bring(const Gemm& g, const TileScratch& scratch,
                              const TileSchedule& schedule, int worker, int rank,
                              const PrefillMemory<kTileWords, kRows>& memory) {
  using Shape = PrefillShape<kTileWords, kRows>;
  const int64_t row_bytes = g.out_tiles * Shape::kTileBytes;
  const int64_t x_stride = static_cast<int64_t>(scratch.rotated.row_groups) * 1024;
  Ring ring, packed_ring;
  TileWalk walk(schedule, worker, 0);
  bool waited = false;
  while (walk.next()) {
    int row_tile, column;
    walk.locate(row_tile, column);
    const int64_t first_tile = static_cast<int64_t>(column) * 8;
    const uint32_t bytes = static_cast<uint32_t>(
        min(static_cast<int64_t>(8), g.out_tiles - first_tile) * Shape::kTileBytes);
    const char* packed = reinterpret_cast<const char*>(g.trellis) + first_tile * Shape::kTileBytes;
    const char* x = reinterpret_cast<const char*>(scratch.rotated.x) + walk.first * x_stride +
                    (static_cast<int64_t>(row_tile) * kBlocks + rank) * Shape::kX;
    for (int step = walk.first; step < walk.last; ++step) {
      uint64_t* const packed_full = memory.packed_full + packed_ring.stage;
      barrier_wait(memory.packed_empty + packed_ring.stage, packed_ring.parity ^ 1);
      const int64_t k_tile = static_cast<int64_t>(step) * kStepTiles + rank * kHalfTiles;
      const int k_tiles = static_cast<int>(
          max(static_cast<int64_t>(0), min(static_cast<int64_t>(kHalfTiles), g.in_tiles - k_tile)));
      barrier_expect(packed_full, k_tiles * bytes);
      for (int i = 0; i < k_tiles; ++i)
        copy_bulk(memory.packed + packed_ring.stage * Shape::kPacked + i * Shape::kKTile,
                  packed + (k_tile + i) * row_bytes, bytes, packed_full);
      packed_ring.advance<Shape::kPackedStages>();
      // The activations come from the launch in front; the weights above did not have to wait for it.
      if (!waited) wait_for_previous_kernel();
      waited = true;
      uint64_t* const full = memory.full + ring.stage;
      barrier_wait(memory.empty + ring.stage, ring.parity ^ 1);
      barrier_expect(full, Shape::kX + Shape::kHalf);  // x, and the other block's half
      copy_bulk(memory.x + ring.stage * Shape::kX, x, Shape::kX, full);
      x += x_stride;
      ring.advance<Shape::kStages>();
    }
  }
}

// One of the warps that decode and multiply.
template <int kTileWords, bool kMul1, int kRows>
__device__ void prefill_multiply(const Gemm& g, const TileScratch& scratch,
                                 const TileSchedule& schedule, const Hash& hash,
                                 const PowersOfTwo& powers, int worker, int rank,
                                 const PrefillMemory<kTileWords, kRows>& memory) {
  using Shape = PrefillShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = hold(threadIdx.x % 32);
  const Window<kTileWords> window(lane);
  const uint32_t packed_at = hold(shared_address(memory.packed) + warp * Shape::kTileBytes);
  const uint32_t x_at = hold(shared_address(memory.x) / 16);
  const uint32_t weights_at = hold((shared_address(memory.weights) + warp / 4 * 64 * 64) / 16);
  // This warp decodes a tile of 16 output features, rows of 64 bytes. stmatrix takes the address of a row
  // of eight weights from each lane: matrices 0 and 1 are rows 0..7 and 8..15 of a tile's first eight
  // inputs, 2 and 3 those of the second. 16-byte piece p of row r lies at p ^ r / 2 % 4.
  constexpr int kOwn = 16 * 64;  // bytes that a warp decodes
  const int own = rank * Shape::kHalf + warp * kOwn;
  const int row = lane % 16, piece = lane / 16 ^ row / 2 % 4;
  const uint32_t store_at = hold(shared_address(memory.weights) + own + row * 64 + piece * 16);

  Ring packed_ring, decoded;  // of decoded stages, the next to be written
  const auto decode = [&]() {
    uint32_t a[kHalfTiles][4];
    barrier_wait(memory.packed_full + packed_ring.stage, packed_ring.parity);
    const uint32_t packed = packed_at + packed_ring.stage * Shape::kPacked;
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i) {
      uint32_t v[3], p[8];
      const uint32_t tile = packed + i * Shape::kKTile;
      load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
      products<kTileWords, !kMul1>(v, hash, powers, p);
      packed_values<kMul1>(p, a[i]);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.packed_empty + packed_ring.stage);
    packed_ring.advance<Shape::kPackedStages>();

    barrier_wait(memory.empty + decoded.stage, decoded.parity ^ 1);
    const uint32_t to = store_at + decoded.stage * Shape::kWeights;
#pragma unroll
    for (int i = 0; i < kHalfTiles; ++i) store_matrices(to ^ i * 32, a[i]);
    // What the tensor cores and the copy below read must be visible to them, from every lane.
    fence_async();
    __syncwarp();
    if (lane == 0) {
      uint64_t* const full = memory.full + decoded.stage;
      barrier_arrive(full);
      copy_to_block(memory.weights + decoded.stage * Shape::kWeights + own, kOwn, full, rank ^ 1);
    }
    decoded.advance<Shape::kStages>();
  };
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
    for (int i = 0; i < kAhead && walk.first + i < walk.last; ++i) decode();
    int before = -1;  // the stage of the step before, until the tensor cores are done with it
    for (int step = walk.first; step < walk.last; ++step) {
      barrier_wait(memory.full + ring.stage, ring.parity);
      const uint32_t weights = weights_at + ring.stage * (Shape::kWeights / 16);
      const uint32_t x = x_at + ring.stage * (Shape::kX / 16);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) {  // 16 inputs are 32 bytes, in units of 16
        const uint32_t half = weights + i / kHalfTiles * (Shape::kHalf / 16);
        wgmma_f16<kRows>(sums, wgmma_descriptor<64>(half + i % kHalfTiles * 2),
                         wgmma_descriptor<128>(x + i * 2));
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (before >= 0) release(before);
      before = ring.stage;
      ring.advance<Shape::kStages>();
      if (step + kAhead < walk.last) decode();
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
      barrier_init(memory.full + i, 1 + Shape::kMathWarps);  // copies have begun, tiles are there
      barrier_init(memory.empty + i, Shape::kMathWarps * 2);
    }
    for (int i = 0; i < Shape::kPackedStages; ++i) {
      barrier_init(memory.packed_full + i, 1);
      barrier_init(memory.packed_empty + i, Shape::kMathWarps);
    }
    barrier_init_fence();
  }
  cluster_sync();

  if (threadIdx.x / 32 < Shape::kMathWarps) {
    take_registers<Shape::kMathRegisters>();
    prefill_multiply<kTileWords, kMul1, kRows>(g, scratch, schedule, hash, powers, worker, rank,
                                               memory);
  } else {
    give_registers<Shape::kCopyRegisters>();
    if (threadIdx.x == Shape::kMathWarps * 32)
      prefill_bring<kTileWords, kRows>(g, scratch, schedule, worker, rank, memory);
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
