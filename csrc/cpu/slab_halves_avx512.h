// The values of 3inst and mcg as integers, for processors that cannot add FP16 numbers.
#pragma once

#include "slab_avx512.h"

namespace trellis {
namespace {

// A half of a hash is +-(1024 + mantissa) << e in units of 2^-13: the mantissa's part times one of eight
// powers, found by the half's upper six bits, three of which decide.
struct Powers {
  alignas(64) int16_t of[64];

  constexpr Powers() : of() {
    for (int i = 0; i < 64; ++i) {
      const int power = 1 << ((i ^ kHalvesXor >> 10) & 3);
      of[i] = static_cast<int16_t>(i & 32 ? -power : power);
    }
  }
};

template <int kCodebook>
struct IntegerHalves : HalvesRange {
  static constexpr float kOffset = ties_up(kCodebook);

  static __m512i half(__m512i hash) {
    static constexpr Powers kPowers;
    const __m512i mantissa = _mm512_ternarylogic_epi32(
        hash, _mm512_set1_epi16(0x3FF), _mm512_set1_epi16(0x400 | (kHalvesXor & 0x3FF)), 0x6A);
    const __m512i power =
        _mm512_permutex2var_epi16(_mm512_load_si512(kPowers.of), _mm512_srli_epi16(hash, 10),
                                  _mm512_load_si512(kPowers.of + 32));
    return _mm512_mullo_epi16(mantissa, power);
  }

  __m512i value(__m512i states) const {
    const Avx512::Hashes hash = Avx512::hashes<kCodebook>(states);
    // To a quarter of that, ties upwards.
    return _mm512_mulhrs_epi16(_mm512_add_epi16(half(hash.low), half(hash.high)),
                               _mm512_set1_epi16(1 << 13));
  }
};

}  // namespace
}  // namespace trellis
