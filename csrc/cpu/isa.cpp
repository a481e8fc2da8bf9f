#include "isa.h"

#ifdef TRELLIS_X86
#include <cpuid.h>
#endif

namespace trellis {
namespace {

#ifdef TRELLIS_X86
// Older compilers know no name for it. The registers are those of AVX-512, which the operating system
// keeps if that is reported.
bool has_fp16() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 23 & 1);
}
#endif

}  // namespace

int64_t available_isas() {
  int64_t isas = 1 << kGeneric;
#ifdef TRELLIS_X86
  // The same sets that setup.py compiles *_avx2.cpp and *_avx512.cpp for.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2) isas |= 1 << kAvx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni =
      avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (avx512) isas |= 1 << kAvx512;
  if (vnni) isas |= 1 << kAvx512Vnni;
  if (vnni && has_fp16()) isas |= 1 << kAvx512Fp16;
#endif
  return isas;
}

Isa best_isa() {
  static const int64_t isas = available_isas();
  for (int isa = kNeon; isa > kGeneric; --isa)
    if (isas >> isa & 1) return static_cast<Isa>(isa);
  return kGeneric;
}

SearchTile search_kernel(Isa isa) {
  switch (isa) {
#ifdef TRELLIS_X86
    case kAvx512:
    case kAvx512Vnni:
    case kAvx512Fp16:
      return search_tile_avx512;
    case kAvx2:
      return search_tile_avx2;
#endif
    default:
      return search_tile_generic;
  }
}

const SlabKernels& slab_kernels(Isa isa) {
  switch (isa) {
#ifdef TRELLIS_X86
    case kAvx512Fp16:
      return avx512fp16_slab_kernels();
    case kAvx512Vnni:
      return avx512vnni_slab_kernels();
    case kAvx512:
      return avx512_slab_kernels();
#endif
    default:
      return generic_slab_kernels();
  }
}

}  // namespace trellis
