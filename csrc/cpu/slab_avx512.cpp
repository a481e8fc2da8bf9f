// The GEMM with AVX-512 F, BW, DQ and VL alone.
#ifdef TRELLIS_X86
#include "slab_avx512.h"

#include "slab_halves_avx512.h"

namespace trellis {
namespace {

// Of the two words in which each state of a strip lies: where they are in its window, and how far they
// are shifted.
template <int kWords, int kStripIndex, int kBegin>
struct Places {
  alignas(64) int16_t first[32], second[32], left[32], right[32];

  constexpr Places() : first(), second(), left(), right() {
    for (int i = 0; i < 32; ++i) {
      const int bit = state_begin(kStripIndex * 32 + i, kWords) - 32 * kBegin;
      // Words are stored in exchanged pairs.
      first[i] = static_cast<int16_t>((bit / 16) ^ 1);
      second[i] = static_cast<int16_t>(((bit / 16 + 1) ^ 1) & 31);
      left[i] = static_cast<int16_t>(bit % 16);
      right[i] = static_cast<int16_t>(16 - bit % 16);
    }
  }
};

struct Plain : Avx512 {
  template <int kWords>
  using Layout = Strips<Plain, kWords>;
  template <int kCodebook>
  using TwoHalves = IntegerHalves<kCodebook>;

  template <int kWords, int kStripIndex>
  static Words states(const int16_t* tile) {
    constexpr int kBegin = window_begin(kStripIndex, kWords);
    static constexpr Places<kWords, kStripIndex, kBegin> kPlaces;
    const __m512i near = window<kWords, kBegin>(tile);
    const __m512i first = _mm512_permutexvar_epi16(load(kPlaces.first), near);
    const __m512i second = _mm512_permutexvar_epi16(load(kPlaces.second), near);
    return _mm512_or_si512(_mm512_sllv_epi16(first, load(kPlaces.left)),
                           _mm512_srlv_epi16(second, load(kPlaces.right)));
  }

  static void dot(Lanes& lanes, Words a, Words b) {
    lanes = _mm512_add_epi32(lanes, _mm512_madd_epi16(a, b));
  }
};

}  // namespace

const SlabKernels& avx512_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<Plain>>("avx512");
  return kernels;
}

}  // namespace trellis
#endif
