#include "isa.h"

namespace trellis {

int64_t available_isas() {
  int64_t isas = 1 << kGeneric;
#ifdef TRELLIS_X86
  // The same sets that setup.py compiles *_avx2.cpp and *_avx512.cpp for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) isas |= 1 << kAvx2;
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    isas |= 1 << kAvx512;
#endif
  return isas;
}

Isa best_isa() {
  static const int64_t isas = available_isas();
  if (isas >> kAvx512 & 1) return kAvx512;
  if (isas >> kAvx2 & 1) return kAvx2;
  return kGeneric;
}

SearchTile search_kernel(Isa isa) {
  switch (isa) {
#ifdef TRELLIS_X86
    case kAvx512:
      return search_tile_avx512;
    case kAvx2:
      return search_tile_avx2;
#endif
    default:
      return search_tile_generic;
  }
}

const SlabKernels& slab_kernels(Isa isa) {
#ifdef TRELLIS_X86
  if (isa == kAvx512) return avx512_slab_kernels();
#endif
  return generic_slab_kernels();  // AVX2 has none of its own yet
}

const SlabKernels& exact_slab_kernels(Isa isa, int /*codebook*/) {
#ifdef TRELLIS_X86
  if (isa >= kAvx512) return exact_avx512_slab_kernels();
#endif
  return generic_slab_kernels();
}

}  // namespace trellis
