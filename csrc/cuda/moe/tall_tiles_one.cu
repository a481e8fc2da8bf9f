#include "tall_tiles_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_tall_tiles_of_experts<1>(bool, const Moe&, const MoeScratch&, int,
                                                     cudaStream_t);
}  // namespace trellis::cuda
