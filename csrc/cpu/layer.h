// The CPU ops over one quantised matrix. No torch headers: bindings.cpp passes plain pointers.
#pragma once

#include <cstdint>
#include <functional>

#include "numeric.h"

namespace trellis {

struct SlabKernels;

// A packed matrix and its vectors; all contiguous. suh and svh are FP16 bit patterns or null, and
// where one is given the padded features on its side are a multiple of 128.
struct Matrix {
  const int16_t* trellis;
  int64_t in_tiles, out_tiles;
  int tile_words;  // int16 words of a tile: 16 * bits
  int codebook;
  const float* values;  // the codebook's 65,536 values
  const uint16_t* suh;
  const uint16_t* svh;

  int64_t in_features() const { return in_tiles * 16; }
  int64_t out_features() const { return out_tiles * 16; }
};

// Contiguous rows; `columns` may fall short of the padded features.
struct Rows {
  const void* data;
  DType dtype;
  int64_t count, columns;
};

struct Output {  // contiguous rows of results
  void* data;
  DType dtype;
  int64_t columns;
  const void* bias;  // `columns` values that are added to each row, or null
  DType bias_dtype;
};

// Floats of scratch that gemm needs: rotated rows and one scale each, and what `prepare` makes of them.
int64_t gemm_scratch_floats(const SlabKernels& kernels, const Matrix& w, int64_t rows);

// out[rows, out_columns] = H(H(x * suh) @ decode(trellis)) * svh + bias.
// Each result is a float32 sum in an order that depends neither on the threads nor on the row count, but
// for whether that is more than the kernel's few_rows.
// `kernels`: of which instruction set.
void gemm(const SlabKernels& kernels, const Matrix& w, const Rows& x, const void* bias,
          DType bias_dtype, float* scratch, void* out, DType out_dtype, int64_t out_columns);

// ---- gemm in two steps, for callers with a schedule of their own --------------------------------
// out[in_features] = H(row of x * suh), divided by a power of two that goes into *scale.
void rotate_row(const Matrix& w, const Rows& x, int64_t row, float* out, float* scale);

// sums[count][128] = the results in the columns of `tiles` output tiles, bias apart, of up to
// kRowBlock rotated rows.
void gemm_block(const SlabKernels& kernels, const Matrix& w, int64_t out_tile, int tiles,
                const float* rows, const float* scales, int count, float* sums);

// out[in_features, out_features] = diag(suh) H decode(trellis) H diag(svh).
void dequantize(const Matrix& w, void* out, DType out_dtype);

// Orthonormal 128-blocks of a contiguous array of blocks * 128 elements; sums in double.
void hadamard_blocks(const void* x, void* out, DType dtype, int64_t blocks);

// ---- the seam for instruction sets ----------------------------------------------------------
// 16 x 128 decoded weights (fewer columns at a ragged edge), rows are inputs.
constexpr int kSlabColumns = 128;
// Rows that share one decoding, at least: what they need meanwhile stays in the second-level cache.
constexpr int kRowBlock = 64;

// Gets sums[count][128] of rows [row, row + count) and a column block, of those multiplied the one that
// begins with tile `tile`; may overwrite them.
using Take = std::function<void(int tile, int row, int count, float* sums)>;

struct SlabKernels {
  const char* name;
  // slab[16][128] of input tile `in_tile`, output tiles [out_tile, out_tile + tiles).
  void (*decode)(const Matrix& w, int64_t in_tile, int64_t out_tile, int tiles, float* slab);
  // sums[rows][128] = x[rows][in_features] (row stride x_stride) @ decode(a column block of `tiles`
  // tiles), for up to kRowBlock rows. A row's sums do not depend on how many rows there are, but for
  // whether they are more than few_rows.
  void (*product)(const Matrix& w, int64_t out_tile, int tiles, const float* x, int64_t x_stride,
                  int rows, float* sums);
  // The same in two steps, the first for all column blocks and up to `row_block` rows together:
  // `prepare` brings one of them into the kernel's own form, and `multiply` takes them from there, for up
  // to `column_blocks` column blocks at once.
  int row_block, column_blocks;
  int few_rows;  // up to which the kernel of the instruction set below does the work
  int64_t (*prepared_bytes)(const Matrix& w, int rows);
  void (*prepare)(const Matrix& w, const float* x, int row, int rows, void* prepared);
  void (*multiply)(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                   const Take& take);
  // out[in_features] = H(row of x * suh), divided by a power of two that goes into *scale; a side without
  // its vector is left alone.
  void (*rotate)(const Matrix& w, const Rows& x, int64_t row, float* out, float* scale);
  // values[128] = H(values) * svh * scale, of which `columns` count
  void (*finish)(const Matrix& w, int64_t first_column, int columns, float scale, float* values);
  // out[row][first_column + i] = values[i] + bias, up to 128 of them; overwrites values.
  void (*write)(const Output& out, int64_t row, int64_t first_column, int columns, float* values);
};

// Of mul1, up to which a row of eight-bit activations is faster than an exact one.
constexpr int kInt8Rows = 2;

const SlabKernels& generic_slab_kernels();
const SlabKernels& avx2_slab_kernels();
const SlabKernels& avx512_slab_kernels();
const SlabKernels& exact_avx512_slab_kernels();
const SlabKernels& avx512vnni_slab_kernels();
const SlabKernels& avx512fp16_slab_kernels();
const SlabKernels& exact_avx512fp16_slab_kernels();
const SlabKernels& int8_slab_kernels();
const SlabKernels& amx_slab_kernels();
const SlabKernels& exact_amx_slab_kernels();
const SlabKernels& neon_slab_kernels();

}  // namespace trellis
