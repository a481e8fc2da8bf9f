// One warp transforms a block of 128.
#include "../gemm/rows.cuh"
#include "plain.h"

namespace trellis::cuda {
namespace {

__global__ void __launch_bounds__(256)
    hadamard(const void* x, void* y, const DType dtype, const int64_t blocks) {
  const int64_t block = static_cast<int64_t>(blockIdx.x) * 8 + threadIdx.x / 32;
  if (block >= blocks) return;
  const int lane = threadIdx.x % 32;
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = load_as_float(x, dtype, block * 128 + lane * 4 + i);
  warp_hadamard(v, lane);
#pragma unroll
  for (int i = 0; i < 4; ++i) store_as(y, dtype, block * 128 + lane * 4 + i, v[i] * kHadamardScale);
}

}  // namespace

cudaError_t launch_hadamard(const void* x, void* y, DType dtype, int64_t blocks,
                            cudaStream_t stream) {
  if (blocks == 0) return cudaSuccess;
  hadamard<<<static_cast<unsigned>((blocks + 7) / 8), 256, 0, stream>>>(x, y, dtype, blocks);
  return cudaGetLastError();
}

}  // namespace trellis::cuda
