// The values of 3inst, mcg and mul1 as the codebooks round them, on processors that calculate with FP16 numbers.
#pragma once

#include "slab_vbmi_avx512.h"

namespace trellis {
namespace {

struct Fp16 : Vbmi {
  // The sum of the two FP16 halves of a hash.
  template <int kCodebook>
  struct TwoHalves : HalvesRange {
    static __m512h half(__m512i hash) {
      // The exponent's upper bits become 110 instead of 011, which is 12 more.
      constexpr int kXor = (kHalvesXor ^ 0x5000) & 0xFFFF;
      return _mm512_castsi512_ph(_mm512_ternarylogic_epi32(
          hash, _mm512_set1_epi32(static_cast<int>(kHalvesAnd)), _mm512_set1_epi16(kXor), 0x6A));
    }

    static __m512h sum(__m512i states) {  // times 2^12
      const Hashes hash = hashes<kCodebook>(states);
      return _mm512_add_ph(half(hash.low), half(hash.high));
    }

    __m512i value(__m512i states) const {
      const __m512h half = _mm512_castsi512_ph(_mm512_set1_epi16(0x3800));
      return _mm512_cvtph_epi16(_mm512_mul_ph(sum(states), half));
    }
  };

  // mul1's, times 2^kPower: one rounding, as of the codebook's own formula, whose constants are FP16.
  template <int kPower>
  static __m512h rounded(__m512i sums) {
    const auto constant = [](float value) {
      return _mm512_set1_ph(static_cast<_Float16>(value * (1 << kPower)));
    };
    return _mm512_fmadd_ph(_mm512_cvtepi16_ph(sums), constant(kMul1Scale), constant(kMul1Offset));
  }
};

// The same with mul1 rounded: for layers that others follow, whose errors add up.
struct RoundedFp16 : Fp16 {
  struct ByteSum : HalvesRange {
    __m512i value(__m512i states) const {
      return _mm512_cvtph_epi16(rounded<11>(Fp16::ByteSum{}.value(states)));
    }
  };
};

}  // namespace
}  // namespace trellis
