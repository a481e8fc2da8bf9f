// The host side of the tiles; included by tiles_*.cu only.
#pragma once

#include "../gemm/launch.cuh"
#include "tiles.cuh"

namespace trellis::cuda {

template <int kTerms>
cudaError_t launch_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                                    cudaStream_t stream) {
  const auto launch = [&](auto kernel) {
    return launch_overlapping(kernel, grid, kTileWarps * 32,
                              shared_for_even_spread(grid, kTileShared<kTerms>), 1, stream, m,
                              scratch, powers_of_two());
  };
  return down ? launch(tile_kernel<true, kTerms>) : launch(tile_kernel<false, kTerms>);
}

}  // namespace trellis::cuda
