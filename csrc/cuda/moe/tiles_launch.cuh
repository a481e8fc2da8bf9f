// The host side of the tiles; included by tiles_*.cu and wide_tiles_*.cu only.
#pragma once

#include "../gemm/launch.cuh"
#include "routes.h"
#include "tiles.cuh"

namespace trellis::cuda {

// `shared`: bytes that a block needs.
template <typename Kernel>
cudaError_t launch_tile_kernel(Kernel kernel, int shared, const Moe& m, const MoeScratch& scratch,
                               int grid, cudaStream_t stream) {
  return launch_overlapping(kernel, grid, kTileWarps * 32, shared_for_even_spread(grid, shared), 1,
                            stream, m, scratch, powers_of_two());
}

template <int kTerms>
cudaError_t launch_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                                    cudaStream_t stream) {
  return launch_tile_kernel(down ? tile_kernel<true, kTerms> : tile_kernel<false, kTerms>,
                            kTileShared<kTerms>, m, scratch, grid, stream);
}

}  // namespace trellis::cuda
