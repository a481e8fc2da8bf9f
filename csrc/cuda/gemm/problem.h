// What the CUDA GEMM kernels and their launchers agree on. No torch and no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace trellis::cuda {

enum class DType : int { Half, BFloat16, Float };

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

// ---- few rows (gemm/small*) -----------------------------------------------------------------------
constexpr int kSmallRows = 8;      // that one MMA takes
constexpr int kSmallMaximum = 32;  // rows of one call of launch_small

// Eights of rows that a kernel is instantiated for: 1, 2 or 4.
inline int small_row_groups(const Gemm& g) { return g.m <= 8 ? 1 : g.m <= 16 ? 2 : 4; }

// The matrix is cut into equal stretches, one a block; their length in groups of four k tiles.
int64_t small_share(const Gemm& g, int sm_count);

// Scratch in bytes: activation fragments, a scale and a correction for each row of each block of 128
// inputs, two parts of 4 KiB for each stretch and eight rows, and a counter for each 128 output
// features.
int64_t small_scratch_bytes(const Gemm& g, int64_t share);

cudaError_t launch_small(const Gemm& g, void* scratch, int64_t share, cudaStream_t stream);

}  // namespace trellis::cuda
