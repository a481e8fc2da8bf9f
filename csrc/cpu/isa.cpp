#include "isa.h"

#include "codebook.h"

#ifdef TRELLIS_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace trellis {
namespace {

#ifdef TRELLIS_X86
// What older compilers have no names for.
struct Newer {
  bool fp16 = false, amx = false;

  Newer() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
    fp16 = d >> 23 & 1;  // in registers that the system keeps if it does AVX-512's
    amx = (d >> 24 & 1) && (d >> 25 & 1) && may_use_tiles();
  }

  // Linux keeps the tiles' eight KiB only for processes that ask.
  static bool may_use_tiles() {
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }
};
#endif

}  // namespace

int64_t available_isas() {
  int64_t isas = 1 << kGeneric;
#ifdef TRELLIS_X86
  // The same sets that setup.py compiles files for, by the endings of their names.
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (avx2) isas |= 1 << kAvx2;
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  const bool vnni =
      avx512 && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vnni");
  if (avx512) isas |= 1 << kAvx512;
  if (vnni) {
    static const Newer newer;
    isas |= 1 << kAvx512Vnni;
    if (newer.fp16) isas |= 1 << kAvx512Fp16;
    if (newer.fp16 && newer.amx) isas |= 1 << kAmx;
  }
#endif
#ifdef __aarch64__
  isas |= 1 << kNeon;
#endif
  return isas;
}

Isa best_isa() {
  static const int64_t isas = available_isas();
  for (int isa = kNeon; isa > kGeneric; --isa)
    if (isas >> isa & 1) return static_cast<Isa>(isa);
  return kGeneric;
}

Isa gemm_isa(int64_t rows) {
  const Isa best = best_isa();
  return rows <= slab_kernels(best).few_rows ? static_cast<Isa>(best - 1) : best;
}

SearchTile search_kernel(Isa isa) {
  switch (isa) {
#ifdef TRELLIS_X86
    case kAvx512:
    case kAvx512Vnni:
    case kAvx512Fp16:
    case kAmx:
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
    case kAmx:
      return amx_slab_kernels();
    case kAvx512Fp16:
      return avx512fp16_slab_kernels();
    case kAvx512Vnni:
      return avx512vnni_slab_kernels();
    case kAvx2:
      return avx2_slab_kernels();
    case kAvx512:
      return avx512_slab_kernels();
#endif
#ifdef __aarch64__
    case kNeon:
      return neon_slab_kernels();
#endif
    default:
      return generic_slab_kernels();
  }
}

const SlabKernels& slab_kernels(Isa isa, [[maybe_unused]] Act act, [[maybe_unused]] int64_t rows) {
#ifdef TRELLIS_X86
  const bool vnni = isa == kAvx512Vnni || isa == kAvx512Fp16 || isa == kAmx;
  if (act == kInt8 && vnni && rows <= kInt8Rows) return int8_slab_kernels();
#endif
  return slab_kernels(isa);
}

const SlabKernels& exact_slab_kernels([[maybe_unused]] Isa isa, [[maybe_unused]] int codebook) {
#ifdef TRELLIS_X86
  const bool hashed = codebook == kInst3 || codebook == kMcg || codebook == kMul1;
  if (isa == kAmx && hashed) return exact_amx_slab_kernels();
  if (isa == kAvx512Fp16 && hashed) return exact_avx512fp16_slab_kernels();
  if (isa >= kAvx512) return exact_avx512_slab_kernels();
#endif
  return generic_slab_kernels();
}

}  // namespace trellis
