#include "experts_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_experts<1, false>(bool, const Moe&, const MoeScratch&, cudaStream_t);
}  // namespace trellis::cuda
