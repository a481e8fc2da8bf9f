// The states of a strip and the dot product, on processors with VBMI and VNNI.
#pragma once

#include <type_traits>

#include "slab_avx512.h"

namespace trellis {
namespace {

// Four states lie within 40 bits. Bytes of the window bring them into 64 bits, in the stream's order from
// the top, out of which each byte of a state is cut.
template <int kWords, int kStripIndex, int kBegin>
struct Cuts {
  alignas(64) uint8_t bytes[64], shifts[64];

  constexpr Cuts() : bytes(), shifts() {
    for (int four = 0; four < 8; ++four) {
      const int first = state_begin(kStripIndex * 32 + 4 * four, kWords) - 32 * kBegin;
      for (int i = 0; i < 8; ++i) {
        const int byte = first / 8 + 7 - i;
        bytes[8 * four + i] = static_cast<uint8_t>((byte ^ 3) & 63);
        const int bit = state_begin(kStripIndex * 32 + 4 * four + i / 2, kWords) - 32 * kBegin;
        shifts[8 * four + i] = static_cast<uint8_t>(48 - (bit - first / 8 * 8) + 8 * (i % 2));
      }
    }
  }
};

// At four bits the two columns of which a tile's 32-bit word is the last of four states each begin in the
// word before it. So a qword of the tile, or one between two of them, has both words, and its bytes can be
// cut without being permuted: the eight qwords that are 64 bytes of a tile, or 64 bytes from a word earlier
// on, are eight fours of states, of four columns (or, by another cut, of the four that are eight further).
struct Quads {
  static constexpr int kWords = 64, kSums = 4, kParts = 2, kRowsAtOnce = 4;

  struct Cuts {
    alignas(64) uint8_t shifts[2][64];

    constexpr Cuts() : shifts() {
      for (int i = 0; i < 128; ++i) {
        const int begin =
            20 + i / 64 * 16 + i % 8 / 2 * 4;  // of the state, from the upper word's top
        shifts[i / 64][i % 64] = static_cast<uint8_t>((88 - begin - 8 * (1 - i % 2)) & 63);
      }
    }
  };

  // Vector: bit 0 tells whether the qwords begin at odd words; bit 1, the columns; bit 2, the tile's half.
  template <int kVector>
  static __m512i states(const int16_t* tile) {
    static constexpr Cuts kCuts;
    constexpr int kBegin = kVector / 4 * 16 + kVector % 2 - 1;
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(kCuts.shifts[kVector / 2 % 2]),
                                        Avx512::window<kWords, kBegin>(tile));
  }

  // The inputs of the eight fours: two times four, in turn.
  struct Order {
    alignas(64) int16_t inputs[32];

    constexpr Order() : inputs() {
      for (int i = 0; i < 32; ++i) {
        const int lane = (i >> 2 & 1) * 2 + (i >> 3 & 1);
        inputs[i] = static_cast<int16_t>(2 * lane + (i & 1) + (i >> 1 & 1) * 8);
      }
    }
  };

  static __m512i inputs(const int16_t* words, int part) {
    return _mm512_broadcast_i32x4(
        _mm_load_si128(reinterpret_cast<const __m128i*>(words + part * 8)));
  }

  // Of a sum's lanes each four belong to a column.
  static void add_columns(const __m512i (&sums)[kSums], float scale, float* to) {
    const auto halves = [&](__m512i a, __m512i b) {
      return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i low = halves(sums[0], sums[2]), high = halves(sums[1], sums[3]);
    const __m512i mixed =
        _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const __m512 columns = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(order, mixed));
    _mm512_storeu_ps(to, _mm512_fmadd_ps(columns, _mm512_set1_ps(scale), _mm512_loadu_ps(to)));
  }
};

struct Vbmi : Avx512 {
  template <int kWords>
  using Layout = std::conditional_t<kWords == Quads::kWords, Quads, Strips<Vbmi, kWords>>;

  static void round(int tile_words, const float* x, int depth, float factor,
                    int16_t (*words)[kStrip], int* total) {
    static constexpr Quads::Order kQuads;
    if (tile_words == Quads::kWords)
      return Avx512::round(load(kQuads.inputs), x, depth, factor, words, total);
    Avx512::round(tile_words, x, depth, factor, words, total);
  }

  template <int kWords, int kStripIndex>
  static Words states(const int16_t* tile) {
    constexpr int kBegin = window_begin(kStripIndex, kWords);
    static constexpr Cuts<kWords, kStripIndex, kBegin> kCuts;
    const __m512i fours =
        _mm512_permutexvar_epi8(_mm512_load_si512(kCuts.bytes), window<kWords, kBegin>(tile));
    return _mm512_multishift_epi64_epi8(_mm512_load_si512(kCuts.shifts), fours);
  }

  static void dot(Lanes& lanes, Words a, Words b) { lanes = _mm512_dpwssd_epi32(lanes, a, b); }
};

}  // namespace
}  // namespace trellis
