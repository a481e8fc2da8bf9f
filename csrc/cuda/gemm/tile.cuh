// Around the main loops of the wide and the tiled kernel: the order in which workers take tiles, how parts
// of a tile's sums meet, and how the sums of a column block become rows of y.
#pragma once

#include "../common/hopper.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {

struct TileScratch {
  Rotated rotated;  // its counters: one for each meeting of a column block of the rest
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

// A thread's sums of 32 rows, chunk `chunk` of a tile's. Registers have no run-time index.
template <int kRows>
__device__ __forceinline__ void take_chunk(const float (&sums)[kRows / 2], int chunk,
                                           float (&taken)[16]) {
#pragma unroll
  for (int c = 0; c < kRows / kOutRows; ++c) {
    if (c != chunk) continue;
#pragma unroll
    for (int i = 0; i < 16; ++i) taken[i] = sums[c * 16 + i];
  }
}

// The last step of 32 rows of a column block whose sums are complete, by the 256 threads that hold them.
__device__ __forceinline__ void finish_chunk(const Gemm& g, const float (&sums)[16],
                                             const float* row_scales, int64_t chunk_row,
                                             int64_t column_block, float* out, int barrier) {
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
  const bool transform = g.svh != nullptr;
  // Of the last pass: this thread's row of the 32, and two neighbours of every 16 features. Rows are
  // dealt so that the two of half a warp are four apart, and banks do not conflict.
  const int row = warp % 4 + lane / 8 % 2 * 4 + lane / 16 * 8 + warp / 4 * 16;
  const int pair = lane % 8 * 2;
  const bool paired = g.out_columns % 2 == 0;
  named_barrier(barrier, kBlockThreads);  // the rows before are out
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float* const at = out + (8 * j + lane % 4 * 2) * kOutStride + warp * 16 + lane / 4;
    at[0] = sums[4 * j], at[kOutStride] = sums[4 * j + 1];
    at[8] = sums[4 * j + 2], at[kOutStride + 8] = sums[4 * j + 3];
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
    for (int i = 0; i < 4; ++i) at[i] = float4{v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
    named_barrier(barrier, kBlockThreads);
  }
  float z[2][8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(out + row * kOutStride + i * 16 + pair);
    z[0][i] = two.x, z[1][i] = two.y;
  }
  if (transform) thread_hadamard(z[0]), thread_hadamard(z[1]);
  if (chunk_row + row >= g.m) return;
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

// A column block of a tile: finished where the piece is a whole tile; else its sums are left in scratch, some
// rows after the other, and whoever finds the last part of some rows there adds these up and finishes them.
// Workers begin at different rows, so that those who come at about the same time share what there is to add.
template <int kRows>
__device__ __forceinline__ void finish_piece(const Gemm& g, const TileScratch& scratch,
                                             const TileSchedule& schedule, const TileWalk& walk,
                                             int row_tile, int column, int in_tile,
                                             const float (&sums)[kRows / 2], float* out,
                                             int barrier, int* flag) {
  constexpr int kChunks = kRows / kOutRows, kMeetings = tile_meetings(kRows);
  constexpr int kTogether = kChunks / kMeetings;  // chunks that meet together
  const float* const row_scales = scratch.rotated.row_scales;
  const int64_t first_row = static_cast<int64_t>(row_tile) * kRows;
  const int64_t column_block = static_cast<int64_t>(column) * kBlocks + in_tile;
  const bool whole = walk.last - walk.first == schedule.steps;
  const int thread = threadIdx.x % kBlockThreads;
  const int start = walk.rest * schedule.pitch;
  const int from = whole ? 0 : start / schedule.share;
  const int to = whole ? 0 : (start + schedule.pitch - 1) / schedule.share;
  const auto part_of = [&](int worker, int chunk) {
    // A stretch begins in the tile of its first slot; any other that it does not have to itself is
    // its last, and has the second.
    const int slot = worker * schedule.share >= start ? 0 : 1;
    return reinterpret_cast<float4*>(scratch.parts) + thread + chunk * 4 * kBlockThreads +
           ((static_cast<int64_t>(worker) * 2 + slot) * kBlocks + in_tile) * (kRows * 32);
  };
  unsigned* const arrived = scratch.rotated.arrived + (walk.rest * kBlocks + in_tile) * kMeetings;
  const int begin = (walk.worker - from) * kMeetings / (to - from + 1);
  float chunk_sums[16];
#pragma unroll 1
  for (int i = 0; i < kMeetings; ++i) {
    const int meeting = whole ? i : (begin + i) % kMeetings, first_chunk = meeting * kTogether;
    if (first_row + first_chunk * kOutRows >= g.m) continue;
    if (!whole) {
#pragma unroll 1
      for (int chunk = first_chunk; chunk < first_chunk + kTogether; ++chunk) {
        take_chunk<kRows>(sums, chunk, chunk_sums);
        float4* const mine = part_of(walk.worker, chunk);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          __stcg(mine + j * kBlockThreads, float4{chunk_sums[4 * j], chunk_sums[4 * j + 1],
                                                  chunk_sums[4 * j + 2], chunk_sums[4 * j + 3]});
      }
      named_barrier(barrier, kBlockThreads);
      if (thread == 0) *flag = arrive(arrived + meeting) == static_cast<unsigned>(to - from);
      named_barrier(barrier, kBlockThreads);
      if (*flag == 0) continue;
    }
#pragma unroll 1
    for (int chunk = first_chunk; chunk < first_chunk + kTogether; ++chunk) {
      if (first_row + chunk * kOutRows >= g.m) break;
      if (whole) {
        take_chunk<kRows>(sums, chunk, chunk_sums);
      } else {
#pragma unroll
        for (float& sum : chunk_sums) sum = 0.0f;
#pragma unroll 1
        for (int worker = from; worker <= to; ++worker) {
          const float4* const part = part_of(worker, chunk);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float4 four = __ldcg(part + j * kBlockThreads);
            chunk_sums[4 * j] += four.x, chunk_sums[4 * j + 1] += four.y;
            chunk_sums[4 * j + 2] += four.z, chunk_sums[4 * j + 3] += four.w;
          }
        }
      }
      finish_chunk(g, chunk_sums, row_scales, first_row + chunk * kOutRows, column_block, out,
                   barrier);
    }
  }
}

}  // namespace trellis::cuda
