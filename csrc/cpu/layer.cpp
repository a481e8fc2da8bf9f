#include "layer.h"

#include <algorithm>

#include "../parallel.h"
#include "hadamard.h"
#include "isa.h"

namespace trellis {
namespace {

// Where the parts of gemm's scratch begin; what is prepared takes whole cache lines.
struct Scratch {
  float *rows, *scales;
  char* prepared;
  int64_t block_bytes;  // of kernels.row_block rows

  Scratch(const SlabKernels& kernels, const Matrix& w, int64_t count, float* scratch)
      : rows(scratch),
        scales(rows + count * w.in_features()),
        prepared(
            reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scales + count) + 63) / 64 * 64)),
        block_bytes(kernels.prepared_bytes(w, kernels.row_block)) {}
};

}  // namespace

int64_t gemm_scratch_floats(const SlabKernels& kernels, const Matrix& w, int64_t rows) {
  const int64_t blocks = rows / kernels.row_block;
  const int64_t bytes = blocks * kernels.prepared_bytes(w, kernels.row_block) +
                        kernels.prepared_bytes(w, static_cast<int>(rows % kernels.row_block));
  return rows * (w.in_features() + 1) + (bytes + 63) / 4 + 1;
}

void rotate_row(const Matrix& w, const Rows& x, int64_t row, float* out, float* scale) {
  slab_kernels(best_isa()).rotate(w, x, row, out, scale);
}

void gemm_block(const SlabKernels& kernels, const Matrix& w, int64_t out_tile, int tiles,
                const float* rows, const float* scales, int count, float* sums) {
  kernels.product(w, out_tile, tiles, rows, w.in_features(), count, sums);
  for (int r = 0; r < count; ++r)
    kernels.finish(w, out_tile * 16, tiles * 16, scales[r], sums + r * kSlabColumns);
}

void gemm(const SlabKernels& kernels, const Matrix& w, const Rows& x, const void* bias,
          DType bias_dtype, float* scratch, void* out, DType out_dtype, int64_t out_columns) {
  const Output output{out, out_dtype, out_columns, bias, bias_dtype};
  const Scratch parts(kernels, w, x.count, scratch);
  const int64_t row_blocks = (x.count + kernels.row_block - 1) / kernels.row_block;
  const auto rows_of = [&](int64_t block) {
    return static_cast<int>(
        std::min<int64_t>(kernels.row_block, x.count - block * kernels.row_block));
  };
  parallel_for(x.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      float* const row = parts.rows + r * w.in_features();
      kernels.rotate(w, x, r, row, parts.scales + r);
      const int64_t block = r / kernels.row_block;
      kernels.prepare(w, row, static_cast<int>(r % kernels.row_block), rows_of(block),
                      parts.prepared + block * parts.block_bytes);
    }
  });

  const int64_t column_blocks = (w.out_tiles + 7) / 8;
  parallel_for(column_blocks * row_blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) static thread_local float sums[kMostRows * kSlabColumns];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / column_blocks, out_tile = item % column_blocks * 8;
      const int tiles = static_cast<int>(std::min<int64_t>(8, w.out_tiles - out_tile));
      const int count = rows_of(block);
      kernels.multiply(w, out_tile, tiles, parts.prepared + block * parts.block_bytes, count, sums);
      const int64_t first_column = out_tile * 16;
      const int columns =
          static_cast<int>(std::min<int64_t>(tiles * 16, out_columns - first_column));
      for (int r = 0; r < count; ++r) {
        const int64_t row = block * kernels.row_block + r;
        float* const values = sums + r * kSlabColumns;
        kernels.finish(w, first_column, columns, parts.scales[row], values);
        kernels.write(output, row, first_column, columns, values);
      }
    }
  });
}

void dequantize(const Matrix& w, void* out, DType out_dtype) {
  const SlabKernels& kernels = generic_slab_kernels();
  const int64_t column_blocks = (w.out_tiles + 7) / 8;
  const int64_t row_blocks = (w.in_tiles + 7) / 8;
  const bool plain = w.suh == nullptr && w.svh == nullptr;
  parallel_for(column_blocks * row_blocks, 1, [&](int64_t begin, int64_t end) {
    static thread_local float block[kHadamard * kSlabColumns];
    float column[kHadamard];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t in_tile = item / column_blocks * 8, out_tile = item % column_blocks * 8;
      const int rows = static_cast<int>(std::min<int64_t>(8, w.in_tiles - in_tile)) * 16;
      const int columns = static_cast<int>(std::min<int64_t>(8, w.out_tiles - out_tile)) * 16;
      for (int t = 0; t < rows / 16; ++t)
        kernels.decode(w, in_tile + t, out_tile, columns / 16, block + 16 * t * kSlabColumns);
      for (int c = 0; w.suh != nullptr && c < columns; ++c) {
        for (int r = 0; r < kHadamard; ++r) column[r] = block[r * kSlabColumns + c];
        hadamard_128(column);
        for (int r = 0; r < kHadamard; ++r)
          block[r * kSlabColumns + c] = column[r] * static_cast<float>(kInvSqrt128);
      }
      for (int r = 0; r < rows; ++r) {
        float* row = block + r * kSlabColumns;
        if (w.svh != nullptr) hadamard_128(row);
        const int64_t in_feature = in_tile * 16 + r;
        for (int c = 0; c < columns; ++c) {
          float value = row[c];
          if (!plain) {
            if (w.svh != nullptr)
              value *= static_cast<float>(kInvSqrt128) * float_from_half(w.svh[out_tile * 16 + c]);
            if (w.suh != nullptr) value *= float_from_half(w.suh[in_feature]);
          }
          store(out, in_feature * w.out_features() + out_tile * 16 + c, out_dtype, value);
        }
      }
    }
  });
}

void hadamard_blocks(const void* x, void* out, DType dtype, int64_t blocks) {
  parallel_for(blocks, 64, [&](int64_t begin, int64_t end) {
    double block[kHadamard];
    for (int64_t b = begin; b < end; ++b) {
      for (int i = 0; i < kHadamard; ++i) block[i] = load(x, b * kHadamard + i, dtype);
      hadamard_128(block);
      for (int i = 0; i < kHadamard; ++i)
        store(out, b * kHadamard + i, dtype, static_cast<float>(block[i] * kInvSqrt128));
    }
  });
}

}  // namespace trellis
