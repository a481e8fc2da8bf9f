#include "layer.h"

#include <algorithm>

#include "../parallel.h"
#include "hadamard.h"

namespace trellis {
void gemm(const SlabKernels& kernels, const Matrix& w, const Rows& x, const void* bias,
          DType bias_dtype, float* scratch, void* out, DType out_dtype, int64_t out_columns) {
  const Output output{out, out_dtype, out_columns, bias, bias_dtype};
  float* rows = scratch;
  float* scales = scratch + x.count * w.in_features();
  parallel_for(x.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r)
      kernels.rotate(w, x, r, rows + r * w.in_features(), scales + r);
  });

  const int64_t column_blocks = (w.out_tiles + 7) / 8;
  const int64_t row_blocks = (x.count + kRowBlock - 1) / kRowBlock;
  parallel_for(column_blocks * row_blocks, 1, [&](int64_t begin, int64_t end) {
    alignas(64) static thread_local float sums[kRowBlock * kSlabColumns];
    for (int64_t item = begin; item < end; ++item) {
      const int64_t first_row = item / column_blocks * kRowBlock;
      const int64_t out_tile = item % column_blocks * 8;
      const int count = static_cast<int>(std::min<int64_t>(kRowBlock, x.count - first_row));
      const int tiles = static_cast<int>(std::min<int64_t>(8, w.out_tiles - out_tile));
      kernels.product(w, out_tile, tiles, rows + first_row * w.in_features(), w.in_features(),
                      count, sums);
      const int64_t first_column = out_tile * 16;
      const int columns =
          static_cast<int>(std::min<int64_t>(tiles * 16, out_columns - first_column));
      for (int r = 0; r < count; ++r)
        kernels.finish(w, output, first_column, columns, first_row + r, scales[first_row + r],
                       sums + r * kSlabColumns);
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
