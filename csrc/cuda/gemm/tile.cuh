// Around the main loops of the wide and the tiled kernel: the order in which workers take tiles, how parts
// of a tile's sums meet, and how the sums of a column block become rows of y.
#pragma once

#include "../common/hopper.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {

struct TileScratch {
  Rotated rotated;  // its counters: one a column block of the rest
  float* parts;     // [workers][2][column blocks of a tile][kRows * 128]
};

constexpr int kStepTiles = 4;       // k tiles of a step: rows of 64 FP16, the width of the swizzle
constexpr int kBlocks = 2;          // sums of 128 features by kRows rows in a worker's tile
constexpr int kBlockThreads = 256;  // that share such a block
constexpr int kOutRows = 32;        // that leave at a time
constexpr int kOutStride = 132;     // floats; rows four apart in banks

// A worker's pieces in their order: whole tiles, then its stretch of the rest. Everyone who works on
// the pieces, in whatever role, walks through the same list.
struct TileWalk {
  const TileSchedule& schedule;
  int worker, round = 0, at, stop;
  int tile, first, last;  // of the current piece, last excluded
  int rest;               // which of the rest, or -1
  int slice;              // of the steps, where the blocks of a cluster share a tile

  __device__ TileWalk(const TileSchedule& s, int worker_, int slice_)
      : schedule(s), worker(worker_), at(worker_ * s.share), slice(slice_) {
    stop = min(at + s.share, s.rest * s.pitch);
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
    rest = at / schedule.pitch;
    first = at - rest * schedule.pitch;
    last = first + min(schedule.pitch - first, stop - at);
    at += last - first;
    last = min(last, schedule.steps);
    tile = schedule.rounds * schedule.workers + rest;
    return true;
  }
};

// Tiles of a band of rows come before those of the next band; within it, rows first.
__device__ __forceinline__ void locate(const TileSchedule& schedule, int tile, int& row_tile,
                                       int& column) {
  const int band = tile / (schedule.band * schedule.columns);
  const int within = tile - band * schedule.band * schedule.columns;
  const int rows = min(schedule.band, schedule.row_tiles - band * schedule.band);
  column = within / rows;
  row_tile = band * schedule.band + within - column * rows;
}

// A place in a ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// The last step of a column block whose sums are complete, by the 256 threads that hold them.
template <int kRows>
__device__ __forceinline__ void finish_tile(const Gemm& g, const float (&sums)[kRows / 2],
                                            const float* row_scales, int64_t first_row,
                                            int64_t column_block, float* out, int barrier) {
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
    named_barrier(barrier, kBlockThreads);  // the rows before are out
    // Registers have no run-time index, so each chunk has its stores; what follows is there once.
#pragma unroll
    for (int c = 0; c < kRows / 32; ++c) {
      if (c != chunk) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float* const at = out + (8 * j + lane % 4 * 2) * kOutStride + warp * 16 + lane / 4;
        const float* const sum = sums + (c * 4 + j) * 4;
        at[0] = sum[0], at[kOutStride] = sum[1], at[8] = sum[2], at[kOutStride + 8] = sum[3];
      }
    }
    named_barrier(barrier, kBlockThreads);
    if (transform) {
      // Features 16 w .. 16 w + 15 of row `lane`.
      float4* const at = reinterpret_cast<float4*>(out + lane * kOutStride + warp * 16);
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
      named_barrier(barrier, kBlockThreads);
    }
    float z[2][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(out + row * kOutStride + i * 16 + pair);
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
        // One at a time: a view of svh may begin at an odd element.
        value.x *= kHadamardScale * load_as_float(g.svh, DType::Half, feature);
        value.y *= kHadamardScale * load_as_float(g.svh, DType::Half, feature + 1);
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
__device__ __forceinline__ bool meet(const TileScratch& scratch, const TileSchedule& schedule,
                                     const TileWalk& walk, int in_tile, int barrier, int* flag,
                                     float (&sums)[kRows / 2]) {
  const int thread = threadIdx.x % kBlockThreads;
  const int start = walk.rest * schedule.pitch;
  const auto part_of = [&](int worker) {
    // A stretch begins in the tile of its first slot; any other that it does not have to itself is
    // its last, and has the second.
    const int slot = worker * schedule.share >= start ? 0 : 1;
    return reinterpret_cast<float4*>(scratch.parts) + thread +
           ((static_cast<int64_t>(worker) * 2 + slot) * kBlocks + in_tile) * (kRows * 32);
  };
  float4* const mine = part_of(walk.worker);
#pragma unroll
  for (int i = 0; i < kRows / 8; ++i)
    __stcg(mine + i * kBlockThreads,
           float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]});
  const int from = start / schedule.share;
  const int to = (start + schedule.pitch - 1) / schedule.share;
  named_barrier(barrier, kBlockThreads);
  if (thread == 0)
    *flag = arrive(scratch.rotated.arrived + walk.rest * kBlocks + in_tile) ==
            static_cast<unsigned>(to - from);
  named_barrier(barrier, kBlockThreads);
  if (*flag == 0) return false;
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) sums[i] = 0.0f;
  for (int worker = from; worker <= to; ++worker) {
    const float4* const part = part_of(worker);
#pragma unroll
    for (int i = 0; i < kRows / 8; ++i) {
      const float4 four = __ldcg(part + i * kBlockThreads);
      sums[4 * i] += four.x, sums[4 * i + 1] += four.y;
      sums[4 * i + 2] += four.z, sums[4 * i + 3] += four.w;
    }
  }
  return true;
}

}  // namespace trellis::cuda
