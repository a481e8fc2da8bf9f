// The pieces of a layer as ops of their own, for checks and debugging. No torch and no device code.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "../gemm/problem.h"

namespace trellis::cuda {

// out[in_tiles * 16, out_tiles * 16] = diag(suh) H decode(trellis) H diag(svh); null: no transform. Of g
// the matrix, its vectors, and y, are used. Every codebook; float32 between decoding and rounding.
cudaError_t launch_dequantize(const Gemm& g, cudaStream_t stream);

// Orthonormal 128-blocks of a contiguous array of blocks * 128 elements; float32 inside.
cudaError_t launch_hadamard(const void* x, void* y, DType dtype, int64_t blocks,
                            cudaStream_t stream);

}  // namespace trellis::cuda
