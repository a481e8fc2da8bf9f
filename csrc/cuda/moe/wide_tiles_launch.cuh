// The host side of the wide tiles; included by wide_tiles_*.cu only.
#pragma once

#include "../gemm/launch.cuh"
#include "wide_tiles.cuh"

namespace trellis::cuda {

template <int kTerms>
cudaError_t launch_wide_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return launch_overlapping(kernel, grid, kTileWarps * 32,
                              shared_for_even_spread(grid, kWideTileShared<kTerms>), 1, stream, m,
                              scratch, powers_of_two());
  };
  return down ? launch(wide_tile_kernel<true, kTerms>) : launch(wide_tile_kernel<false, kTerms>);
}

}  // namespace trellis::cuda
