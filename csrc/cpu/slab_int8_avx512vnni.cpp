// mul1 with activations of eight bits, for a row or two: an option that costs accuracy.
//
// The bytes of a weight's hash meet the activation as they are, two dot products of bytes for 32 weights,
// and need not be added up first. From three rows on adding them up once is cheaper.
#ifdef TRELLIS_X86
#include "slab_vbmi_avx512.h"

namespace trellis {
namespace {

struct Bytes : Vbmi {
  // Both bytes of a word of `x` are the activation.
  static void dot(Lanes& lanes, const Hashes& weights, Words x) {
    lanes = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(lanes, weights.low, x), weights.high, x);
  }

  struct ByteSum : ByteSumRange {
    Hashes value(Words states) const { return hashes<kMul1>(states); }
  };
};

struct Int8 {
  using Kernel = Slab<Bytes>;
  static constexpr int kRowBlock = kInt8Rows, kColumnBlocks = 1, kFewRows = 0;

  static int64_t prepared_bytes(const Matrix& w, int rows) {
    return Kernel::prepared_bytes(w, rows);
  }

  static void prepare(const Matrix& w, const float* x, int row, int, void* prepared) {
    Inputs* const inputs = static_cast<Inputs*>(prepared) + row * input_blocks(w);
    for (int64_t block = 0; block < input_blocks(w); ++block) {
      const int64_t in_tile = block * kDepth;
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
      quantise<Bytes>(w, x + in_tile * 16, depth, ByteSumRange::kLargest, 127, inputs[block]);
      for (auto& words : inputs[block].words) {
        const __m512i x = Bytes::load(words);
        const __m512i upper = _mm512_slli_epi16(x, 8);
        Bytes::store(words, _mm512_or_si512(upper, _mm512_srli_epi16(upper, 8)));
      }
    }
  }

  static void multiply(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                       const Take& take) {
    alignas(64) float sums[kRowBlock * kSlabColumns] = {};
    const Inputs* const inputs = static_cast<const Inputs*>(prepared);
    const int64_t blocks = input_blocks(w);
    with_rate(w.tile_words, [&](auto words) {
      const int64_t stride = w.out_tiles * words.value;
      for (int64_t block = 0; block < blocks; ++block) {
        const int64_t in_tile = block * kDepth;
        const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
        const int16_t* packed = w.trellis + in_tile * stride + out_tile * words.value;
        for (int t = 0; t < tiles; ++t, packed += words.value) {
          const auto meet = [&](auto count) {
            Kernel::template fused<words.value, count.value>(
                packed, stride, depth, Bytes::ByteSum{}, inputs + block, blocks, sums + t * 16,
                Kernel::Vectors{});
          };
          if (rows == 1)
            meet(std::integral_constant<int, 1>{});
          else
            meet(std::integral_constant<int, 2>{});
        }
      }
    });
    for (int r = 0; r < rows; ++r)
      rescale<ByteSumRange>(total_of(inputs + r * blocks, blocks), sums + r * kSlabColumns);
    take(0, 0, rows, sums);
  }
};

}  // namespace

const SlabKernels& int8_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Int8>("avx512 vnni int8");
  return kernels;
}

}  // namespace trellis
#endif
