// What the CUDA GEMM kernels and their launchers agree on. No torch and no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../../cpu/numeric.h"

namespace trellis::cuda {

// y[m, out_columns] = H(H(x * suh) @ decode(trellis)) * svh + bias, all rows contiguous.
struct Gemm {
  const void* x;
  DType x_dtype;
  int64_t m, in_columns;    // in_columns may fall short of in_tiles * 16
  const uint32_t* trellis;  // 16-byte aligned
  int64_t in_tiles, out_tiles;
  int tile_words, codebook;
  const void* suh;  // FP16, or null: no transform
  const void* svh;
  const void* bias;
  DType bias_dtype;
  void* y;
  DType y_dtype;
  int64_t out_columns;
};

// ---- the choice of kernels (gemm/dispatch.cu) -----------------------------------------------------
// Numbers are what _trellis_gemm_route takes.
enum class Route : int { Automatic, Small, Wide64, Wide128, Wide256, Tiled128, Last = Tiled128 };

struct Gpu {
  int capability;  // 90 for 9.0
  int sm_count;
};

// The fastest route, by measurement; a pure function of shapes, rate, codebook and GPU.
Route choose_route(const Gemm& g, const Gpu& gpu);
bool can_run(Route route, const Gpu& gpu);

// How many of g.m rows the next launch takes: all of them, or fewer where it takes no more at a time, or those that are
// left cost less by another launch. Each launch decodes the weights again.
int64_t rows_at_once(const Gemm& g, Route route, const Gpu& gpu);

// ---- few rows (gemm/small*) -----------------------------------------------------------------------
constexpr int kSmallRows = 8;      // that one MMA takes
constexpr int kSmallMaximum = 32;  // rows of one call of launch_small

// The matrix is cut into equal stretches, one a block; their length in groups of four k tiles.
int64_t small_share(const Gemm& g, int sm_count);

// Scratch in bytes: activation fragments, a scale and a correction for each row of each block of 128
// inputs, two parts of 4 KiB for each stretch and eight rows, and a counter for each 128 output
// features.
int64_t small_scratch_bytes(const Gemm& g, int64_t share);

cudaError_t launch_small(const Gemm& g, void* scratch, int64_t share, cudaStream_t stream);

// ---- many rows: with wgmma on sm_90a (gemm/wide*), with mma on others (gemm/tiled*) --------------------
// Rows of a tile that leave together and, where blocks share a tile, meet together: what registers allow.
__host__ __device__ constexpr int out_rows(int rows) { return rows == 256 ? 64 : 32; }

// How the product is cut into tiles of two column blocks (256 output features) by `rows` rows, and those
// into steps of 64 inputs. A worker is a block, or a cluster of two blocks where rows are 256. Workers
// take whole tiles in turn; what would not fill the last round evenly is cut into equal stretches of
// steps instead. Where tiles are few, a worker is a cluster of blocks that take a slice of one tile's
// steps each.
struct TileSchedule {
  bool wgmma;
  int rows;
  int cluster;  // blocks of a worker
  int slices;   // of a tile's steps; then the cluster has as many blocks
  int workers;
  int row_tiles, columns, steps;
  int band;    // row tiles that are worked on side by side, so that the cache serves them
  int rounds;  // whole tiles of each worker
  int rest;    // tiles that are cut into stretches
  int share;   // steps of a stretch
  int pitch;   // steps from one tile's stretches to the next one's: `steps`, or more to end evenly
  int64_t cost;  // estimated steps of the longest worker; 0 for slices and for a given share
};

// `share`: 0 for the best way; otherwise stretches of so many steps, or, negative, so many slices.
TileSchedule tile_schedule(const Gemm& g, Route route, int sm_count, int64_t share);

// Scratch in bytes: 2 for each row (rounded up to a tile) and input, two parts of 4 for each worker and
// sum of a tile, 4 for each row and each column block of the rest.
int64_t tile_scratch_bytes(const TileSchedule& schedule);

cudaError_t launch_tiles(const Gemm& g, const TileSchedule& schedule, void* scratch,
                         cudaStream_t stream);

}  // namespace trellis::cuda
