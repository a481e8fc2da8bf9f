#include "layer.h"

#include <algorithm>

#include "../parallel.h"
#include "hadamard.h"
#include "isa.h"

namespace trellis {
namespace {

// Rows in blocks of even size, none of which is too small for what the others run on.
struct RowBlocks {
  int64_t rows, count;

  RowBlocks(const SlabKernels& kernels, int64_t rows)
      : rows(rows), count((rows + kernels.row_block - 1) / kernels.row_block) {}

  int64_t first(int64_t block) const {
    return rows / count * block + std::min(block, rows % count);
  }
  int size(int64_t block) const { return static_cast<int>(first(block + 1) - first(block)); }
};

// Where the parts of gemm's scratch begin; what is prepared takes whole cache lines.
struct Scratch {
  float *rows, *scales;
  char* prepared;
  int64_t block_bytes;

  Scratch(const SlabKernels& kernels, const Matrix& w, const RowBlocks& blocks, float* scratch)
      : rows(scratch),
        scales(rows + blocks.rows * w.in_features()),
        prepared(reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(scales + blocks.rows) + 63) /
                                         64 * 64)),
        block_bytes(kernels.prepared_bytes(w, blocks.size(0))) {}
};

}  // namespace

int64_t gemm_scratch_floats(const SlabKernels& kernels, const Matrix& w, int64_t rows) {
  const RowBlocks blocks(kernels, rows);
  const int64_t bytes = blocks.count * kernels.prepared_bytes(w, blocks.size(0));
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
  const RowBlocks blocks(kernels, x.count);
  const Scratch parts(kernels, w, blocks, scratch);
  parallel_for(x.count, 1, [&](int64_t begin, int64_t end) {
    float* const row = parts.rows + begin * w.in_features();  // one place for all, for the cache
    int64_t block = 0;
    for (int64_t r = begin; r < end; ++r) {
      while (blocks.first(block + 1) <= r) ++block;
      kernels.rotate(w, x, r, row, parts.scales + r);
      kernels.prepare(w, row, static_cast<int>(r - blocks.first(block)), blocks.size(block),
                      parts.prepared + block * parts.block_bytes);
    }
  });

  // Without svh the last column block may be narrow, and trimmed off altogether.
  const int64_t out_tiles = std::min(w.out_tiles, (out_columns + 127) / 128 * 8);
  // As many column blocks at once as leave every thread two turns.
  const bool wide = out_tiles >= 16 * kernels.column_blocks * thread_count();
  const int64_t most = wide ? 8 * kernels.column_blocks : 8;
  const int64_t groups = (out_tiles + most - 1) / most;
  parallel_for(groups * blocks.count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; ++item) {
      const int64_t block = item / groups, out_tile = item % groups * most;
      const int tiles = static_cast<int>(std::min(most, out_tiles - out_tile));
      const auto take = [&](int tile, int first, int count, float* values) {
        const int64_t column = (out_tile + tile) * 16;
        const int columns = static_cast<int>(
            std::min<int64_t>(std::min(8, tiles - tile) * 16, out_columns - column));
        for (int r = 0; r < count; ++r, values += kSlabColumns) {
          const int64_t row = blocks.first(block) + first + r;
          kernels.finish(w, column, columns, parts.scales[row], values);
          kernels.write(output, row, column, columns, values);
        }
      };
      kernels.multiply(w, out_tile, tiles, parts.prepared + block * parts.block_bytes,
                       blocks.size(block), take);
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
