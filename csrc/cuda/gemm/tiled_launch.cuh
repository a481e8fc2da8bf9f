// The host side of one rate's tiled kernels; included by tiled_k*.cu only.
#pragma once

#include "launch.cuh"
#include "tiled.cuh"

namespace trellis::cuda {

template <int kTileWords>
cudaError_t launch_tiled_rate(const Gemm& g, const TileScratch& scratch,
                              const TileSchedule& schedule, cudaStream_t stream) {
  using Shape = TiledShape<kTileWords>;
  return with_codebook<kTileWords>(g.codebook, [&](auto codebook) {
    return launch_overlapping(tiled_kernel<kTileWords, decltype(codebook)::value>, schedule.workers,
                              Shape::kThreads, Shape::kBytes, 1, stream, g, scratch, schedule,
                              powers_of_two());
  });
}

}  // namespace trellis::cuda
