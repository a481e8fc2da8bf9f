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
constexpr int kOutStride = 132;     // floats; rows four apart in banks
// Floats of shared memory for a column block's rows on their way out, their scales, svh and bias.
constexpr int out_floats(int out_rows) { return out_rows * (kOutStride + 1) + 2 * 128; }

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

// Calls f with a thread's sums of rows that leave together. Registers have no run-time index.
template <int kOutRows, int kSums, typename F>
__device__ __forceinline__ void with_chunk(const float (&sums)[kSums], int chunk, F f) {
  constexpr int kOfChunk = kOutRows / 2;
#pragma unroll
  for (int c = 0; c < kSums / kOfChunk; ++c)
    if (c == chunk) f(*reinterpret_cast<const float (*)[kOfChunk]>(sums + c * kOfChunk));
}

// What a column block of a tile needs in the end, loaded while its last products are under way: of this
// thread's feature, if it is one of the first 128, svh and bias, and its row's scale.
template <int kRows>
struct OutVectors {
  float svh = 1.0f, bias = 0.0f, row_scale = 0.0f;

  __device__ OutVectors(const Gemm& g, const TileScratch& scratch, int row_tile, int column_block) {
    const int thread = threadIdx.x % kBlockThreads;
    if (thread < kRows)
      row_scale = scratch.rotated.row_scales[static_cast<int64_t>(row_tile) * kRows + thread];
    const int64_t feature = static_cast<int64_t>(column_block) * 128 + thread;
    if (thread >= 128 || feature >= g.out_columns) return;
    if (g.svh != nullptr) svh = kHadamardScale * load_as_float(g.svh, DType::Half, feature);
    if (g.bias != nullptr) bias = load_as_float(g.bias, g.bias_dtype, feature);
  }

  // Into shared memory behind the rows of a chunk.
  template <int kOutRows>
  __device__ void put(int chunk, float* out) const {
    const int thread = threadIdx.x % kBlockThreads;
    float* const to = out + kOutRows * kOutStride;
    if (thread < 128) to[thread] = svh, to[128 + thread] = bias;
    if (thread / kOutRows == chunk) to[256 + thread % kOutRows] = row_scale;
  }
};

// The last step of some rows of a column block whose sums are complete, by the threads that hold them: into
// shared memory first, and from there a row's features to few threads. The transform's butterflies are taken
// where their two values are: features 8 apart while they are sums, 1, 2, 4, 64 and, with 64 rows, 32 apart
// in the thread that has them afterwards, the rest between lanes.
template <int kOutRows>
__device__ __forceinline__ void put_rows(const float (&sums)[kOutRows / 2], bool transform,
                                         float* out) {
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < kOutRows / 8; ++j) {
    float a = sums[4 * j], b = sums[4 * j + 1], c = sums[4 * j + 2], d = sums[4 * j + 3];
    if (transform) butterfly(a, c), butterfly(b, d);
    float* const at = out + (8 * j + lane % 4 * 2) * kOutStride + warp * 16 + lane / 4;
    at[0] = a, at[kOutStride] = b, at[8] = c, at[kOutStride + 8] = d;
  }
}

template <int kOutRows>
__device__ __forceinline__ void finish_rows(const Gemm& g, float* out, int64_t chunk_row,
                                            int64_t column_block) {
  constexpr int kEights = kOutRows / 16;  // of features, that a thread takes
  static_assert(kEights == 2 || kEights == 4, "");
  const int warp = threadIdx.x / 32 % 8, lane = threadIdx.x % 32;
  constexpr int kApart = 128 / kEights;  // features between eights of a thread
  const float* const svh = out + kOutRows * kOutStride;
  const float *const bias = svh + 128, *const row_scales = svh + 256;
  // A row, and eights of its features. Rows are dealt so that the banks of eight neighbouring lanes do not
  // conflict, eights so that a row's lanes write neighbours.
  const int in_chunk = kEights == 4 ? warp * 8 + lane % 8
                                    : warp / 2 * 8 + warp % 2 * 2 + lane % 2 + lane / 2 % 2 * 4;
  const int first = lane / (kOutRows / 8) * 8;
  const int64_t row = chunk_row + in_chunk;
  const auto read = [](const float* from, float (&v)[8]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(from + i * 4);
      v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
    }
  };
  float* const here = out + in_chunk * kOutStride + first;
  float z[kEights][8];
#pragma unroll
  for (int i = 0; i < kEights; ++i) read(here + i * kApart, z[i]);
  if (g.svh != nullptr) {
#pragma unroll
    for (int i = 0; i < kEights; ++i) thread_hadamard(z[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      butterfly(z[0][j], z[1][j]);
      if constexpr (kEights == 4) {
        butterfly(z[2][j], z[3][j]);
        butterfly(z[0][j], z[2][j]), butterfly(z[1][j], z[3][j]);
      }
#pragma unroll
      for (int stride = kOutRows / 4; stride < 32;
           stride *= 2) {  // lanes whose features are 16 apart
        const float sign = lane & stride ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < kEights; ++i)
          z[i][j] = fmaf(sign, z[i][j], __shfl_xor_sync(0xFFFFFFFFu, z[i][j], stride));
      }
    }
  }
  if (row >= g.m) return;
  const float row_scale = row_scales[in_chunk];
  const bool in_eights = g.out_columns % 8 == 0 && reinterpret_cast<uintptr_t>(g.y) % 16 == 0;
#pragma unroll
  for (int i = 0; i < kEights; ++i) {
    float by[8];
    read(svh + first + i * kApart, by);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      z[i][j] = z[i][j] * by[j] * row_scale;  // neither overflows before y
    if (g.bias != nullptr) {
      read(bias + first + i * kApart, by);
#pragma unroll
      for (int j = 0; j < 8; ++j) z[i][j] += by[j];
    }
    const int64_t feature = column_block * 128 + first + i * kApart;
    if (!in_eights) {
#pragma unroll
      for (int j = 0; j < 8; ++j) here[i * kApart + j] = z[i][j];
    } else if (feature < g.out_columns) {
      store_neighbours(g.y, g.y_dtype, row * g.out_columns + feature, z[i]);
    }
  }
  if (in_eights) return;
  // Elements one by one: seldom, so short code rather than fast.
#pragma unroll 1
  for (int i = 0; i < kEights * 8; ++i) {
    const int of_thread = i / 8 * kApart + i % 8;
    const int64_t feature = column_block * 128 + first + of_thread;
    if (feature < g.out_columns)
      store_as(g.y, g.y_dtype, row * g.out_columns + feature, here[of_thread]);
  }
}

// Added to a counter of parts by whoever will not wait for the others.
constexpr unsigned kLeaves = 1u << 16;
// Clocks that a worker waits for others at most. None depends on another's being there at all.
constexpr long long kPatience = 1 << 17;

// Whether this thread's worker, one of `workers`, is to add the parts of some rows, now that its own is there. Each
// row's owner is, and waits for the rest, if that is the last it has to do; else whoever comes last.
__device__ __forceinline__ bool adds_parts(unsigned* arrived, unsigned workers, bool owns,
                                           bool waits) {
  const auto all_there = [&](unsigned count) { return count % kLeaves == workers; };
  const unsigned before = arrive(arrived, owns && !waits ? 1 + kLeaves : 1);
  if (all_there(before + 1)) return owns || before >= kLeaves;
  if (!owns || !waits) return false;
  const long long start = clock64();
  while (clock64() - start < kPatience)
    if (all_there(arrivals(arrived))) return true;
  return all_there(arrive(arrived, kLeaves));
}

// A column block of a tile: finished where the piece is a whole tile; else its sums are left in scratch, and the
// workers that share the tile each add up some of its rows and finish them.
template <int kRows>
__device__ __forceinline__ void finish_piece(const Gemm& g, const TileScratch& scratch,
                                             const TileSchedule& schedule, const TileWalk& walk,
                                             int row_tile, int column, int in_tile,
                                             const OutVectors<kRows>& vectors,
                                             const float (&sums)[kRows / 2], float* out,
                                             int barrier, int* flag) {
  constexpr int kOutRows = out_rows(kRows), kChunks = kRows / kOutRows, kQuads = kOutRows / 8;
  const int64_t first_row = static_cast<int64_t>(row_tile) * kRows;
  const int64_t column_block = static_cast<int64_t>(column) * kBlocks + in_tile;
  const bool transform = g.svh != nullptr;
  const int thread = threadIdx.x % kBlockThreads;
  const int chunks = static_cast<int>(
      min(static_cast<int64_t>(kChunks), (g.m - first_row + kOutRows - 1) / kOutRows));
  const auto finish = [&](int chunk, auto put) {
    named_barrier(barrier, kBlockThreads);  // the rows before are out
    vectors.template put<kOutRows>(chunk, out);
    put();
    named_barrier(barrier, kBlockThreads);
    finish_rows<kOutRows>(g, out, first_row + chunk * kOutRows, column_block);
  };
  if (walk.last - walk.first == schedule.steps) {
#pragma unroll 1
    for (int chunk = 0; chunk < chunks; ++chunk)
      finish(chunk, [&] {
        with_chunk<kOutRows>(sums, chunk, [&](const auto& of_chunk) {
          put_rows<kOutRows>(of_chunk, transform, out);
        });
      });
    return;
  }

  const int start = walk.rest * schedule.pitch;
  const int from = start / schedule.share, to = (start + schedule.pitch - 1) / schedule.share;
  const auto part_of = [&](int worker, int chunk) {
    // A stretch begins in the tile of its first slot; any other that it does not have to itself is
    // its last, and has the second.
    const int slot = worker * schedule.share >= start ? 0 : 1;
    return reinterpret_cast<float4*>(scratch.parts) + thread +
           (((static_cast<int64_t>(worker) * 2 + slot) * kBlocks + in_tile) * kChunks + chunk) *
               (kQuads * kBlockThreads);
  };
  float4* const mine = part_of(walk.worker, 0);
#pragma unroll
  for (int j = 0; j < kRows / 8; ++j) {
    if (j / kQuads < chunks)
      __stcg(mine + j * kBlockThreads,
             float4{sums[4 * j], sums[4 * j + 1], sums[4 * j + 2], sums[4 * j + 3]});
  }
  named_barrier(barrier, kBlockThreads);
  if (thread < 32) {
    const int workers = to - from + 1;
    bool adds = false;
    if (thread < chunks)
      adds = adds_parts(
          scratch.rotated.arrived + (walk.rest * kBlocks + in_tile) * kChunks + thread, workers,
          from + thread * workers / chunks == walk.worker, walk.at >= walk.stop);
    const unsigned all = __ballot_sync(0xFFFFFFFFu, adds);
    if (thread == 0) *flag = static_cast<int>(all);
  }
  named_barrier(barrier, kBlockThreads);
  const int adds = *flag;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if ((adds >> chunk & 1) == 0) continue;
    finish(chunk, [&] {
      float all[kOutRows / 2] = {};
      // As many at a time as registers allow, so that they wait for memory together.
      constexpr int kTogether = kRows == 256 ? 2 : 1;
#pragma unroll 1
      for (int worker = from; worker <= to; worker += kTogether) {
        float4 parts[kTogether][kQuads];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          const float4* const part = part_of(min(worker + i, to), chunk);
#pragma unroll
          for (int j = 0; j < kQuads; ++j) parts[i][j] = __ldcg(part + j * kBlockThreads);
        }
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if (worker + i > to) break;
#pragma unroll
          for (int j = 0; j < kQuads; ++j) {
            all[4 * j] += parts[i][j].x, all[4 * j + 1] += parts[i][j].y;
            all[4 * j + 2] += parts[i][j].z, all[4 * j + 3] += parts[i][j].w;
          }
        }
      }
      put_rows<kOutRows>(all, transform, out);
    });
  }
}

}  // namespace trellis::cuda
