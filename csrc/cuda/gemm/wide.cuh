// y for many rows on Hopper: each weight is decoded once for a tile of 64, 128 or 256 rows, straight
// into the registers from which wgmma takes it. No copy of the decoded matrix exists anywhere.
//
// Two launches. `rotate_rows` (rotate.cu) writes H(x * suh) in the swizzled atoms that wgmma reads. Then
// workers take tiles of two column blocks (128 output features, one Hadamard block, each) by kRows rows.
// With up to 128 rows a worker is one block with four warpgroups; with 256 rows it is a cluster of two
// blocks, each with two warpgroups and one of the column blocks, that share every load of x.
//
// Roles: the last warpgroup of a block, of which one lane is busy, brings packed tiles and x, a step of 64 inputs at a time, into a ring
// of stages by bulk copies; the others decode and multiply. Weights are the A operand: warp w of a
// warpgroup decodes one tile of 16 output features, and a lane's eight weights of a tile are its own part of
// the fragment. While the tensor cores work on one k tile, the warp decodes the next.
//
// What a tile's sums go through: where tiles are few, the blocks of a cluster take slices of one tile's
// steps, and each adds and finishes a share of the rows, which it reads from the others' shared memory.
// Otherwise a tile that lies in several stretches leaves its sums in scratch, and whichever block comes
// last adds the parts. The order of additions is fixed in both, so that results are bitwise repeatable.
// The total passes through shared memory: Hadamard, svh, row scale, bias, rounding.
#pragma once

#include "../common/hopper.cuh"
#include "../decode/decode.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {

struct WideScratch {
  Rotated rotated;  // its counters: one a column block of the rest
  float* parts;     // [workers][2][column blocks of a tile][kRows * 128]
};

constexpr int kStepTiles = 4;  // k tiles of a step: rows of 64 FP16, the width of the swizzle
constexpr int kPairBlocks = 2;  // column blocks of a worker's tile
constexpr int kPairThreads = 256;  // that share a column block

template <int kTileWords, int kRows>
struct WideShape {
  static constexpr int kCluster = kRows == 256 ? 2 : 1;
  static constexpr int kColumnBlocks = kPairBlocks / kCluster;  // of one thread block
  static constexpr int kMathWarps = kColumnBlocks * 8;
  static constexpr int kThreads = kMathWarps * 32 + 128;
  // The copying warpgroup gives its registers to the others; 64 Ki in all.
  static constexpr int kCopyRegisters = kMathWarps == 8 ? 40 : 32;
  static constexpr int kMathRegisters = kMathWarps == 8 ? 232 : 112;
  // Shared memory in bytes: stages of x, stages of packed tiles, rows on their way out, barriers.
  static constexpr int kX = kRows * 128;
  static constexpr int kTileBytes = kTileWords * 2;
  static constexpr int kKTile = kColumnBlocks * 8 * kTileBytes;
  static constexpr int kPacked = kStepTiles * kKTile;
  static constexpr int kOutRows = 32;    // that leave at a time
  static constexpr int kOutStride = 132;  // floats; four apart in banks
  static constexpr int kOut = kColumnBlocks * kOutRows * kOutStride * 4;
  static constexpr int kLimit = 227 * 1024 - kOut - 256;
  static constexpr int kFitting = (kLimit) / (kX + kPacked);
  static constexpr int kStages = kFitting < 8 ? kFitting : 8;
  static_assert(kCluster > 1 || kStages * (kX + kPacked) >= kPairBlocks * kRows * kOutStride * 4,
                "the sums of a slice take the place of the stages");
  static constexpr int kBytes = kStages * (kX + kPacked) + kOut + 256;
};

// A worker's pieces in their order: whole tiles, then its stretch of the rest. Everyone who works on
// the pieces, in whatever role, walks through the same list.
struct WideWalk {
  const WideSchedule& schedule;
  int worker, round = 0, at, stop;
  int tile, first, last;  // of the current piece, last excluded
  int rest;               // which of the rest, or -1

  int slice;  // of the steps, where the blocks of a cluster share a tile

  __device__ WideWalk(const WideSchedule& s, int worker_, int slice_)
      : schedule(s), worker(worker_), at(worker_ * s.share), slice(slice_) {
    stop = min(at + s.share, s.rest * s.steps);
  }

  __device__ bool next() {
    if (round < schedule.rounds) {
      tile = round++ * schedule.workers + worker;
      first = schedule.steps * slice / schedule.slices;
      last = schedule.steps * (slice + 1) / schedule.slices;
      rest = -1;
      return true;
    }
    if (at >= stop) return false;
    rest = at / schedule.steps;
    first = at - rest * schedule.steps;
    last = first + min(schedule.steps - first, stop - at);
    at += last - first;
    tile = schedule.rounds * schedule.workers + rest;
    return true;
  }

  // Tiles of a band of rows come before those of the next band; within it, rows first.
  __device__ void locate(int& row_tile, int& pair) const {
    const int band = tile / (schedule.band * schedule.pairs);
    const int within = tile - band * schedule.band * schedule.pairs;
    const int rows = min(schedule.band, schedule.row_tiles - band * schedule.band);
    pair = within / rows;
    row_tile = band * schedule.band + within - pair * rows;
  }
};

#ifdef TRELLIS_SM90A

struct WideRing {
  int stage = 0;
  uint32_t parity = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The copying warpgroup: one lane of it.
template <int kTileWords, int kRows>
__device__ void wide_bring(const Gemm& g, const WideScratch& scratch, const WideSchedule& schedule,
                           int worker, int slice, int rank, char* x_stages, char* packed_stages,
                           uint64_t* full, uint64_t* empty) {
  using Shape = WideShape<kTileWords, kRows>;
  const int64_t row_bytes = g.out_tiles * Shape::kTileBytes;
  WideRing ring;
  WideWalk walk(schedule, worker, slice);
  bool waited = false;
  while (walk.next()) {
    int row_tile, pair;
    walk.locate(row_tile, pair);
    const int64_t first_tile =
        (static_cast<int64_t>(pair) * kPairBlocks + rank * Shape::kColumnBlocks) * 8;
    const int64_t left = g.out_tiles - first_tile;
    const uint32_t bytes = static_cast<uint32_t>(
        max(static_cast<int64_t>(0), min(static_cast<int64_t>(Shape::kColumnBlocks * 8), left)) *
        Shape::kTileBytes);
    const char* packed = reinterpret_cast<const char*>(g.trellis) + first_tile * Shape::kTileBytes +
                         static_cast<int64_t>(walk.first) * kStepTiles * row_bytes;
    const int64_t x_stride = static_cast<int64_t>(scratch.rotated.row_groups) * 1024;
    const char* x = reinterpret_cast<const char*>(scratch.rotated.x) + walk.first * x_stride +
                    static_cast<int64_t>(row_tile) * Shape::kX;
    for (int step = walk.first; step < walk.last; ++step) {
      uint64_t* const here = full + ring.stage;
      barrier_wait(empty + ring.stage, ring.parity ^ 1);
      const int k_tiles = static_cast<int>(min(static_cast<int64_t>(kStepTiles),
                                               g.in_tiles - static_cast<int64_t>(step) * kStepTiles));
      barrier_expect(here, Shape::kX + (bytes > 0 ? k_tiles * bytes : 0));
      for (int i = 0; i < k_tiles && bytes > 0; ++i)
        copy_bulk(packed_stages + ring.stage * Shape::kPacked + i * Shape::kKTile,
                  packed + i * row_bytes, bytes, here);
      // The activations come from the launch in front; the weights above did not have to wait for it.
      if (!waited) wait_for_previous_kernel();
      waited = true;
      char* const to = x_stages + ring.stage * Shape::kX;
      if constexpr (Shape::kCluster == 1) {
        copy_bulk(to, x, Shape::kX, here);
      } else {
        constexpr int kPart = Shape::kX / Shape::kCluster;
        copy_bulk_multicast(to + rank * kPart, x + rank * kPart, kPart, here,
                            (1 << Shape::kCluster) - 1);
      }
      packed += kStepTiles * row_bytes;
      x += x_stride;
      ring.advance<Shape::kStages>();
    }
  }
}

// The last step of a column block whose sums are complete, by the 256 threads that hold them.
template <int kRows>
__device__ __forceinline__ void wide_finish(const Gemm& g, const float (&sums)[kRows / 2],
                                            const float* row_scales, int64_t first_row,
                                            int64_t column_block, float* out, int barrier) {
  constexpr int kStride = WideShape<64, kRows>::kOutStride;
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
  const bool transform = g.svh != nullptr;
  // Of the last pass: this thread's row of the 32, and two neighbours of every 16 features. Rows are
  // dealt so that the two of half a warp are four apart, and banks do not conflict.
  const int row = warp % 4 + lane / 8 % 2 * 4 + lane / 16 * 8 + warp / 4 * 16;
  const int pair = lane % 8 * 2;
  const bool paired = g.out_columns % 2 == 0;
#pragma unroll 1
  for (int chunk = 0; chunk < kRows / 32; ++chunk) {
    const int64_t chunk_row = first_row + chunk * 32;
    if (chunk_row >= g.m) break;
    named_barrier(barrier, kPairThreads);  // the rows before are out
    // Registers have no run-time index, so each chunk has its stores; what follows is there once.
#pragma unroll
    for (int c = 0; c < kRows / 32; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* const at = out + (8 * j + lane % 4 * 2) * kStride + warp * 16 + lane / 4;
        const float* const sum = sums + (c * 4 + j) * 4;
        at[0] = sum[0], at[kStride] = sum[1], at[8] = sum[2], at[kStride + 8] = sum[3];
      }
    }
    named_barrier(barrier, kPairThreads);
    if (transform) {
      // Features 16 w .. 16 w + 15 of row `lane`.
      float4* const at = reinterpret_cast<float4*>(out + lane * kStride + warp * 16);
      float v[16];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float4 four = at[i];
        v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
      }
      thread_hadamard(v);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        at[i] = float4{v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
      named_barrier(barrier, kPairThreads);
    }
    float z[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(out + row * kStride + i * 16 + pair);
      z[0][i] = two.x, z[1][i] = two.y;
    }
    if (transform) thread_hadamard(z[0]), thread_hadamard(z[1]);
    if (chunk_row + row >= g.m) continue;
    const float row_scale = row_scales[chunk_row + row];
    const int64_t start = (chunk_row + row) * g.out_columns;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t feature = column_block * 128 + i * 16 + pair;
      if (feature >= g.out_columns) break;
      const bool both = feature + 1 < g.out_columns;
      float2 value{z[0][i] * row_scale, z[1][i] * row_scale};
      if (transform) {
        const float2 scale =
            __half22float2(*reinterpret_cast<const __half2*>(static_cast<const __half*>(g.svh) +
                                                             feature));
        value.x *= kHadamardScale * scale.x, value.y *= kHadamardScale * scale.y;
      }
      if (g.bias != nullptr) {
        value.x += load_as_float(g.bias, g.bias_dtype, feature);
        if (both) value.y += load_as_float(g.bias, g.bias_dtype, feature + 1);
      }
      if (paired) {
        store_pair(g.y, g.y_dtype, start + feature, value);
      } else {
        store_as(g.y, g.y_dtype, start + feature, value.x);
        if (both) store_as(g.y, g.y_dtype, start + feature + 1, value.y);
      }
    }
  }
}

// A piece that is not a whole tile: leaves its sums in scratch; true for whoever finds all the parts
// there, whose sums are then the total.
template <int kRows>
__device__ __forceinline__ bool wide_meet(const WideScratch& scratch, const WideSchedule& schedule,
                                          const WideWalk& walk, int in_pair, int barrier, int* flag,
                                          float (&sums)[kRows / 2]) {
  const int thread = threadIdx.x % kPairThreads;
  const int start = walk.rest * schedule.steps;
  const auto part_of = [&](int worker) {
    // A stretch begins in the tile of its first slot; any other that it does not have to itself is
    // its last, and has the second.
    const int slot = worker * schedule.share >= start ? 0 : 1;
    return reinterpret_cast<float4*>(scratch.parts) + thread +
           ((static_cast<int64_t>(worker) * 2 + slot) * kPairBlocks + in_pair) * (kRows * 32);
  };
  float4* const mine = part_of(walk.worker);
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i)
    __stcg(mine + i * kPairThreads,
           float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
  const int from = start / schedule.share;
  const int to = (start + schedule.steps - 1) / schedule.share;
  named_barrier(barrier, kPairThreads);
  if (thread == 0)
    *flag = arrive(scratch.rotated.arrived + walk.rest * kPairBlocks + in_pair) ==
            static_cast<unsigned>(to - from);
  named_barrier(barrier, kPairThreads);
  if (*flag == 0) return false;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
  for (int worker = from; worker <= to; ++worker) {
    const float4* const part = part_of(worker);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const float4 four = __ldcg(part + i * kPairThreads);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y;
      sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
  return true;
}

// A slice of a tile: leaves its sums in shared memory, all column blocks and rows, for wide_gather.
template <int kTileWords, int kRows>
__device__ __forceinline__ void wide_leave(const float (&sums)[kRows / 2], float* all) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The sums take the place of the stages, with which every warp is done then.
  named_barrier(3, Shape::kMathWarps * 32);
  float* const block = all + warp / 8 * kRows * Shape::kOutStride + warp % 8 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    float* const at = block + (8 * j + lane % 4 * 2) * Shape::kOutStride;
    at[0] = sums[4 * j], at[Shape::kOutStride] = sums[4 * j + 1];
    at[8] = sums[4 * j + 2], at[Shape::kOutStride + 8] = sums[4 * j + 3];
  }
}

// Adds the slices' sums for this block's share of the rows, in order, and finishes them.
template <int kTileWords, int kRows>
__device__ __forceinline__ void wide_gather(const Gemm& g, const WideScratch& scratch,
                                            const WideSchedule& schedule, int tile, int slice,
                                            const float* all) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  WideWalk walk(schedule, 0, 0);
  walk.tile = tile;
  int row_tile, pair;
  walk.locate(row_tile, pair);
  const int rows = kRows / schedule.slices;
  for (int i = warp; i < rows * kPairBlocks; i += Shape::kMathWarps) {
    const int in_tile = slice * rows + i / kPairBlocks, in_pair = i % kPairBlocks;
    const int64_t row = static_cast<int64_t>(row_tile) * kRows + in_tile;
    const int64_t column_block = static_cast<int64_t>(pair) * kPairBlocks + in_pair;
    if (row >= g.m || column_block * 8 >= g.out_tiles) continue;
    const float* const at = all + (in_pair * kRows + in_tile) * Shape::kOutStride + lane * 4;
    float z[4] = {};
    for (int block = 0; block < schedule.slices; ++block) {
      float part[4];
      load_from_block(at, block, part);
#pragma unroll
      for (int j = 0; j < 4; ++j) z[j] += part[j];
    }
    finish_row(g, z, row, column_block * 128, scratch.rotated.row_scales[row]);
  }
}

// One of the warps that decode and multiply.
template <int kTileWords, bool kMul1, int kRows>
__device__ void wide_multiply(const Gemm& g, const WideScratch& scratch,
                              const WideSchedule& schedule, const Hash& hash, const PowersOfTwo& powers, int worker,
                              int slice, int rank, char* x_stages, const char* packed_stages, float* out,
                              int* flags, uint64_t* full, uint64_t* empty) {
  using Shape = WideShape<kTileWords, kRows>;
  const int warp = threadIdx.x / 32, lane = hold(threadIdx.x % 32);
  const int in_block = warp / 8;  // which of the block's column blocks
  const int in_pair = rank * Shape::kColumnBlocks + in_block;
  const Window<kTileWords> window(lane);
  const auto release = [&](int stage) {
    __syncwarp();
    if (lane == 0) {
      if constexpr (Shape::kCluster == 1) {
        barrier_arrive(empty + stage);
      } else {
#pragma unroll
        for (int block = 0; block < Shape::kCluster; ++block)
          barrier_arrive_at(empty + stage, block);
      }
    }
  };
  const uint32_t packed_at = hold(shared_address(packed_stages) + warp * Shape::kTileBytes);
  const uint32_t x_at = hold(shared_address(x_stages) / 16);
  float* const all = reinterpret_cast<float*>(x_stages);
  wait_for_previous_kernel();  // for the row scales

  WideRing ring;
  WideWalk walk(schedule, worker, slice);
  while (walk.next()) {
    float sums[kRows / 2];
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
    uint32_t v[3];  // the packed words of the next tile, fetched one tile ahead
    const auto fetch = [&](int stage, int i) {
      const uint32_t tile = packed_at + stage * Shape::kPacked + i * Shape::kKTile;
      load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
    };
    barrier_wait(full + ring.stage, ring.parity);
    fetch(ring.stage, 0);
    int before = -1;  // the stage of the step before, until the tensor cores are done with it
    for (int step = walk.first; step < walk.last; ++step) {
      const int stage = ring.stage;
      const uint32_t x = x_at + stage * (Shape::kX / 16);
      uint32_t a[2][4];  // one is decoded into while the tensor cores work on the other
#pragma unroll
      for (int i = 0; i < kStepTiles; ++i) {
        uint32_t p[8];
        products<kTileWords, !kMul1>(v, hash, powers, p);
        packed_values<kMul1>(p, a[i % 2]);
        if (i + 1 < kStepTiles) {
          fetch(stage, i + 1);
        } else {
          ring.advance<Shape::kStages>();
          if (step + 1 < walk.last) {
            barrier_wait(full + ring.stage, ring.parity);
            fetch(ring.stage, 0);
          }
        }
        wgmma_fence();
        wgmma_f16<kRows>(sums, a[i % 2], wgmma_descriptor(x + i * 2));  // 16 inputs: 32 bytes
        wgmma_commit();
        wgmma_wait<1>();
        if (i == 0 && before >= 0) release(before);
      }
      before = stage;
    }
    wgmma_wait<0>();
    release(before);
    if constexpr (Shape::kCluster == 1) {
      if (schedule.slices > 1) {
        wide_leave<kTileWords, kRows>(sums, all);
        return;
      }
    }

    int row_tile, pair;
    walk.locate(row_tile, pair);
    const int64_t column_block = static_cast<int64_t>(pair) * kPairBlocks + in_pair;
    if (column_block * 8 >= g.out_tiles) continue;
    const int barrier = 1 + in_block;
    if (walk.last - walk.first < schedule.steps &&
        !wide_meet<kRows>(scratch, schedule, walk, in_pair, barrier, flags + in_block, sums))
      continue;
    wide_finish<kRows>(g, sums, scratch.rotated.row_scales, static_cast<int64_t>(row_tile) * kRows,
                       column_block, out + in_block * Shape::kOutRows * Shape::kOutStride, barrier);
  }
}

#endif  // TRELLIS_SM90A

template <int kTileWords, bool kMul1, int kRows>
__global__ void __launch_bounds__(WideShape<kTileWords, kRows>::kThreads, 1)
    wide_kernel(const Gemm g, const WideScratch scratch, const WideSchedule schedule,
                const Hash hash, const PowersOfTwo powers) {
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
  const int worker = static_cast<int>(blockIdx.x) / (Shape::kCluster * schedule.slices);
  if (threadIdx.x == 0) {
    for (int i = 0; i < Shape::kStages; ++i) {
      barrier_init(full + i, 1);
      barrier_init(empty + i, Shape::kMathWarps * Shape::kCluster);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if constexpr (Shape::kCluster > 1) cluster_sync();

  if (threadIdx.x / 32 >= Shape::kMathWarps) {
    give_registers<Shape::kCopyRegisters>();
    if (threadIdx.x == Shape::kMathWarps * 32)
      wide_bring<kTileWords, kRows>(g, scratch, schedule, worker, slice, rank, x_stages,
                                    packed_stages, full, empty);
  } else {
    take_registers<Shape::kMathRegisters>();
    wide_multiply<kTileWords, kMul1, kRows>(g, scratch, schedule, hash, powers, worker, slice, rank,
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
cudaError_t launch_wide_rate(const Gemm& g, const WideScratch& scratch,
                             const WideSchedule& schedule, cudaStream_t stream);

}  // namespace trellis::cuda
