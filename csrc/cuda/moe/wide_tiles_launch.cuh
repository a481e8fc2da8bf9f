// The host side of the wide tiles; included by wide_tiles_*.cu only.
#pragma once

#include "routes.h"
#include "tiles_launch.cuh"
#include "wide_tiles.cuh"

namespace trellis::cuda {

template <int kTerms>
cudaError_t launch_wide_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream) {
  return launch_tile_kernel(down ? wide_tile_kernel<true, kTerms> : wide_tile_kernel<false, kTerms>,
                            kWideTileShared<kTerms>, m, scratch, grid, stream);
}

}  // namespace trellis::cuda
