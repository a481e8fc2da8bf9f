// The states of a strip and the dot product, on processors with VBMI and VNNI.
#pragma once

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

struct Vbmi : Avx512 {
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
