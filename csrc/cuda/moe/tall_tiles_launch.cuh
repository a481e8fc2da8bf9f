// The host side of the tall tiles; included by tall_tiles_*.cu only.
#pragma once

#include "../gemm/launch.cuh"
#include "routes.h"
#include "tall_tiles.cuh"

namespace trellis::cuda {

template <int kTerms>
cudaError_t launch_tall_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream) {
  return launch_overlapping(down ? tall_tile_kernel<true, kTerms> : tall_tile_kernel<false, kTerms>,
                            grid, kTallThreads, TallShape<kTerms>::kBytes, 1, stream, m, scratch,
                            powers_of_two());
}

}  // namespace trellis::cuda
