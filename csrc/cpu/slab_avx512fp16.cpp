// The GEMM with AVX-512, VBMI, VNNI and FP16 arithmetic.
#ifdef TRELLIS_X86
#include "slab_fp16_avx512.h"

namespace trellis {

const SlabKernels& avx512fp16_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<Fp16>>("avx512_fp16");
  return kernels;
}

const SlabKernels& exact_avx512fp16_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<RoundedFp16>>("avx512 fp16 exact");
  return kernels;
}

}  // namespace trellis
#endif
