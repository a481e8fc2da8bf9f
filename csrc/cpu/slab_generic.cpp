// Decoding and multiplying slabs of 16 x 128 weights in plain C++, for any machine.
#include <cstring>

#include "../rates.h"
#include "layer.h"
#include "rows.h"

namespace trellis {
namespace {

// Four positions at a time: their states lie in one 64-bit window at every rate.
template <int kWords>
void decode_tile(const int16_t* tile, const float* values, float* slab) {
  // The stream's 16-bit words in order, with the neighbours that windows reach around its seam.
  uint16_t stream[1 + kWords + 3];
  uint16_t* const words = stream + 1;
  for (int i = 0; i < kWords; ++i) words[i] = static_cast<uint16_t>(tile[i ^ 1]);
  words[-1] = words[kWords - 1];
  for (int i = 0; i < 3; ++i) words[kWords + i] = words[i];

  for (int group = 0; group < 64; ++group) {
    // A state is the 16 stream bits that end with its symbol; counted from the word before bit 0.
    const int first = 4 * group * kWords / 16 + kWords / 16;
    const uint16_t* from = words - 1 + first / 16;
    const uint64_t window = static_cast<uint64_t>(from[0]) << 48 |
                            static_cast<uint64_t>(from[1]) << 32 |
                            static_cast<uint64_t>(from[2]) << 16 | from[3];
    float* const out = slab + (group & 6) * kSlabColumns + (group >> 3) + 8 * (group & 1);
    for (int j = 0; j < 4; ++j) {
      const int end = (4 * group + j + 1) * kWords / 16;
      const uint64_t state = window >> (48 - first % 16 - (end - first)) & 0xFFFFu;
      out[((j & 1) + 8 * (j >> 1)) * kSlabColumns] = values[state];
    }
  }
}

void decode(const Matrix& w, int64_t in_tile, int64_t out_tile, int tiles, float* slab) {
  const int16_t* tile = w.trellis + (in_tile * w.out_tiles + out_tile) * w.tile_words;
  with_rate(w.tile_words, [&](auto words) {
    for (int t = 0; t < tiles; ++t)
      decode_tile<words.value>(tile + t * words.value, w.values, slab + 16 * t);
  });
}

void multiply(const float* x, int64_t x_stride, int rows, const float* slab, float* sums) {
  // 32 sums stay in registers over the 16 inputs.
  constexpr int kGroup = 32;
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < kSlabColumns; c += kGroup) {
      float group[kGroup];
      std::memcpy(group, sums + r * kSlabColumns + c, sizeof(group));
      for (int k = 0; k < 16; ++k) {
        const float activation = x[r * x_stride + k];
        for (int i = 0; i < kGroup; ++i) group[i] += activation * slab[k * kSlabColumns + c + i];
      }
      std::memcpy(sums + r * kSlabColumns + c, group, sizeof(group));
    }
  }
}

void product(const Matrix& w, int64_t out_tile, int tiles, const float* x, int64_t x_stride,
             int rows, float* sums) {
  alignas(64) float slab[16 * kSlabColumns];
  std::memset(slab, 0, sizeof(slab));
  std::memset(sums, 0, sizeof(float) * kSlabColumns * rows);
  for (int64_t in_tile = 0; in_tile < w.in_tiles; ++in_tile) {
    decode(w, in_tile, out_tile, tiles, slab);
    multiply(x + in_tile * 16, x_stride, rows, slab, sums);
  }
}

int64_t prepared_bytes(const Matrix& w, int rows) {
  return rows * w.in_features() * static_cast<int64_t>(sizeof(float));
}

void prepare(const Matrix& w, const float* x, int row, int, void* prepared) {
  std::memcpy(static_cast<float*>(prepared) + row * w.in_features(), x,
              sizeof(float) * w.in_features());
}

void multiply_prepared(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                       const Take& take) {
  alignas(64) static thread_local float sums[kRowBlock * kSlabColumns];
  product(w, out_tile, tiles, static_cast<const float*>(prepared), w.in_features(), rows, sums);
  take(0, 0, rows, sums);
}

}  // namespace

const SlabKernels& generic_slab_kernels() {
  static const SlabKernels kernels{"generic", decode,         product, kRowBlock,         1,
                                   0,         prepared_bytes, prepare, multiply_prepared, rotate,
                                   finish,    write};
  return kernels;
}

}  // namespace trellis
