#include "wide_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_wide_rate<48>(const Gemm&, const TileScratch&, const TileSchedule&,
                                          cudaStream_t);
}  // namespace trellis::cuda
