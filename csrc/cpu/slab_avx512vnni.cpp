// The GEMM with AVX-512 and, of its later additions, VBMI and VNNI.
#ifdef TRELLIS_X86
#include "slab_halves_avx512.h"
#include "slab_vbmi_avx512.h"

namespace trellis {
namespace {

struct Vnni : Vbmi {
  template <int kCodebook>
  using TwoHalves = IntegerHalves<kCodebook>;
};

}  // namespace

const SlabKernels& avx512vnni_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<Vnni>>("avx512_vnni");
  return kernels;
}

}  // namespace trellis
#endif
