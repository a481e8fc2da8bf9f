#include "small_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_small_rate<32>(const Gemm&, const SmallScratch&, int, cudaStream_t);
}  // namespace trellis::cuda
