#include "tiled_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_tiled_rate<48>(const Gemm&, const TileScratch&, const TileSchedule&,
                                           cudaStream_t);
}  // namespace trellis::cuda
