// What slab_integer.h needs of AVX-512, but for what newer processors have better instructions for: the
// states of a strip, the dot product, the values of 3inst and mcg.
#pragma once

#include "avx512.h"
#include "slab_integer.h"

namespace trellis {
namespace {

struct StripOrder {
  alignas(64) int16_t inputs[kStrip];

  constexpr StripOrder() : inputs() {
    for (int i = 0; i < kStrip; ++i) inputs[i] = static_cast<int16_t>(input_of(i));
  }
};

struct Avx512 {
  static constexpr int kLanes = 32, kRowsAtOnce = 3;
  using Words = __m512i;
  using Lanes = __m512i;

  static Words load(const int16_t* from) { return _mm512_load_si512(from); }
  static void store(int16_t* to, Words words) { _mm512_store_si512(to, words); }
  static Lanes zero() { return _mm512_setzero_si512(); }

  // sums[16] += what the lanes of the strips of a tile add up to, times `scale`. Of a lane's index, bit 1
  // tells the column of its strip; over the others the sum is taken, two vectors becoming one.
  static void add_columns(const Lanes (&strips)[kStrips], float scale, float* sums) {
    __m512i fours[4], twos[2];
    for (int i = 0; i < 4; ++i) {
      const __m512i a = strips[2 * i], b = strips[2 * i + 1];
      fours[i] =
          _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x44), _mm512_shuffle_i64x2(a, b, 0xEE));
    }
    for (int i = 0; i < 2; ++i) {
      const __m512i a = fours[2 * i], b = fours[2 * i + 1];
      twos[i] =
          _mm512_add_epi32(_mm512_shuffle_i64x2(a, b, 0x88), _mm512_shuffle_i64x2(a, b, 0xDD));
    }
    const __m512 a = _mm512_castsi512_ps(twos[0]), b = _mm512_castsi512_ps(twos[1]);
    const __m512i mixed = _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(a, b, 0x88)),
                                           _mm512_castps_si512(_mm512_shuffle_ps(a, b, 0xDD)));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 2, 6, 10, 14, 1, 5, 9, 13, 3, 7, 11, 15);
    const __m512 columns = _mm512_cvtepi32_ps(_mm512_permutexvar_epi32(order, mixed));
    _mm512_storeu_ps(sums, _mm512_fmadd_ps(columns, _mm512_set1_ps(scale), _mm512_loadu_ps(sums)));
  }

  static void magnitudes(const float* x, int depth, float* largest, float* sum) {
    __m512 most = _mm512_setzero_ps(), total = _mm512_setzero_ps();
    for (int k = 0; k < depth; ++k) {
      const __m512 magnitude = _mm512_abs_ps(_mm512_loadu_ps(x + k * 16));
      most = _mm512_max_ps(most, magnitude);
      total = _mm512_add_ps(total, magnitude);
    }
    *largest = _mm512_reduce_max_ps(most);
    *sum = _mm512_reduce_add_ps(total);
  }

  static void round(int, const float* x, int depth, float factor, int16_t (*words)[kStrip],
                    int* total) {
    static constexpr StripOrder kOrder;
    round(load(kOrder.inputs), x, depth, factor, words, total);
  }

  static void round(Words order, const float* x, int depth, float factor, int16_t (*words)[kStrip],
                    int* total) {
    __m512i sum = _mm512_setzero_si512();
    for (int k = 0; k < depth; ++k) {
      const __m512i rounded =
          _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + k * 16), _mm512_set1_ps(factor)));
      sum = _mm512_add_epi32(sum, rounded);
      const __m512i narrow = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(rounded));
      store(words[k], _mm512_permutexvar_epi16(order, narrow));
    }
    *total = _mm512_reduce_add_epi32(sum);
  }

  // The hashes of 32 states, their halves apart.
  struct Hashes {
    __m512i low, high;
  };

  template <int kCodebook>
  static Hashes hashes(Words states) {
    constexpr Hash kHash = hash_of(kCodebook);
    const auto word = [](uint32_t x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
    const __m512i first = word(kHash.multiplier), second = word(kHash.multiplier >> 16);
    __m512i low = _mm512_mullo_epi16(states, first);
    __m512i high =
        _mm512_add_epi16(_mm512_mulhi_epu16(states, first), _mm512_mullo_epi16(states, second));
    if constexpr (kHash.addend != 0) {
      low = _mm512_add_epi16(low, word(kHash.addend));
      high = _mm512_add_epi16(high, word(kHash.addend >> 16));
      const __mmask32 carry = _mm512_cmplt_epu16_mask(low, word(kHash.addend));
      high = _mm512_mask_sub_epi16(high, carry, high, _mm512_set1_epi16(-1));
    }
    return {low, high};
  }

  struct ByteSum : ByteSumRange {
    Words value(Words states) const {
      const Hashes hash = hashes<kMul1>(states);
      const __m512i one = _mm512_set1_epi8(1);
      return _mm512_add_epi16(_mm512_maddubs_epi16(hash.low, one),
                              _mm512_maddubs_epi16(hash.high, one));
    }
  };

  struct Lookup : LookupRange {
    const float* values;

    Words value(Words states) const {
      const auto rounded = [&](__m512i index) {
        const __m512 found = _mm512_i32gather_ps(index, values, 4);
        return _mm512_cvtps_epi32(_mm512_mul_ps(found, _mm512_set1_ps(1 / kScale)));
      };
      const __m512i even = rounded(_mm512_and_si512(states, _mm512_set1_epi32(0xFFFF)));
      const __m512i odd = rounded(_mm512_srli_epi32(states, 16));
      return _mm512_mask_blend_epi16(0xAAAAAAAA, even, _mm512_slli_epi32(odd, 16));
    }
  };

  // 32-bit word of a tile, -1 for the last one before the first, at which `window` begins.
  static constexpr int window_begin(int strip, int words) {
    const int bit = state_begin(strip * kStrip, words);
    const int first = bit < 0 ? -1 : bit / 32;
    return words < 32 ? std::min(first, 0) : std::min(first, words / 2 - 16);
  }

  // 64 bytes of a tile, among which the states of a strip; no more is read than the tile.
  template <int kWords, int kBegin>
  static __m512i window(const int16_t* tile) {
    if constexpr (kBegin < 0) {
      int32_t last;
      std::memcpy(&last, tile + kWords - 2, sizeof(last));
      return _mm512_alignr_epi32(window<kWords, 0>(tile), _mm512_set1_epi32(last), 15);
    } else if constexpr (kWords < 32) {
      return _mm512_maskz_loadu_epi32((1 << kWords / 2) - 1, tile);
    } else {
      return _mm512_loadu_si512(tile + 2 * kBegin);
    }
  }
};

}  // namespace
}  // namespace trellis
