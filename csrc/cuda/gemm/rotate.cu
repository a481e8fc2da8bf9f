// One block a row, one warp a 128-block of inputs.
#include "rotate_device.cuh"

namespace trellis::cuda {
namespace {

constexpr int kFewRows = 264;  // up to here a block's latency is what matters, beyond its occupancy

__global__ void __launch_bounds__(1024)
    rotate_rows(const Gemm g, const Rotated to, const Operand operand) {
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int warps = blockDim.x / 32;
  const int64_t blocks = (g.in_tiles + 7) / 8;
  __shared__ float largest[32];
  float scale = 1.0f;
  if (row < g.m) {
    const float most = largest_of_row(g, row);
    if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = most;
    __syncthreads();
    const int lane = threadIdx.x % 32;
    scale = scale_of_row(warp_max(lane < warps ? largest[lane] : 0.0f));
  }
  if (threadIdx.x == 0) to.row_scales[row] = scale;
  for (int64_t i = row * blockDim.x + threadIdx.x; i < to.counters;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to.arrived[i] = 0;
  for (int64_t block = threadIdx.x / 32; block < blocks; block += warps)
    rotate_block(g, to, operand, row, block, block, 1.0f / scale);
}

__global__ void zero_counters(unsigned* counters, int64_t count) {
  let_next_kernel_start();
  for (int64_t i = threadIdx.x; i < count; i += blockDim.x) counters[i] = 0;
}

}  // namespace

cudaError_t launch_zero(unsigned* counters, int64_t count, cudaStream_t stream) {
  zero_counters<<<1, 256, 0, stream>>>(counters, count);
  return cudaGetLastError();
}

cudaError_t launch_rotate(const Gemm& g, const Rotated& to, Operand operand, int64_t rows,
                          cudaStream_t stream) {
  const int threads = rows <= kFewRows ? 1024 : 256;
  rotate_rows<<<static_cast<unsigned>(rows), threads, 0, stream>>>(g, to, operand);
  return cudaGetLastError();
}

}  // namespace trellis::cuda
