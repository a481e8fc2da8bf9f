// The GEMM with AVX-512, VBMI, VNNI and FP16 arithmetic.
#ifdef TRELLIS_X86
#include "slab_vbmi_avx512.h"

namespace trellis {
namespace {

struct Fp16 : Vbmi {
  // The sum of the two FP16 halves of a hash, times 2^12, as a 16-bit integer.
  template <int kCodebook>
  struct TwoHalves {
    static constexpr float kLargest = 16384, kScale = 0x1p-12f, kOffset = 0;

    static __m512h half(__m512i hash) {
      // The exponent's upper bits become 110 instead of 011, which is 12 more.
      constexpr int kXor = (kHalvesXor ^ 0x5000) & 0xFFFF;
      return _mm512_castsi512_ph(_mm512_ternarylogic_epi32(
          hash, _mm512_set1_epi32(static_cast<int>(kHalvesAnd)), _mm512_set1_epi16(kXor), 0x6A));
    }

    __m512i value(__m512i states) const {
      const Hashes hash = hashes<kCodebook>(states);
      return _mm512_cvtph_epi16(_mm512_add_ph(half(hash.low), half(hash.high)));
    }
  };
};

}  // namespace

const SlabKernels& avx512fp16_slab_kernels() {
  static const SlabKernels kernels{"avx512_fp16", generic_slab_kernels().decode,
                                   Slab<Fp16>::product, rotate_row, finish_row};
  return kernels;
}

}  // namespace trellis
#endif
