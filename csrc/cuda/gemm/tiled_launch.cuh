// The host side of one rate's tiled kernels; included by tiled_k*.cu only.
#pragma once

#include "launch.cuh"
#include "tiled.cuh"

namespace trellis::cuda {

template <int kTileWords, bool kMul1>
cudaError_t launch_tiled_kernel(const Gemm& g, const TileScratch& scratch,
                                const TileSchedule& schedule, cudaStream_t stream) {
  using Shape = TiledShape<kTileWords>;
  return launch_overlapping(tiled_kernel<kTileWords, kMul1>, schedule.workers, Shape::kThreads,
                            Shape::kBytes, 1, stream, g, scratch, schedule, hash_of(g.codebook),
                            powers_of_two());
}

template <int kTileWords>
cudaError_t launch_tiled_rate(const Gemm& g, const TileScratch& scratch,
                              const TileSchedule& schedule, cudaStream_t stream) {
  if (g.codebook == 2) return launch_tiled_kernel<kTileWords, true>(g, scratch, schedule, stream);
  if constexpr (kTileWords % 16 == 0)  // half rates exist for mul1 only, which the bindings check
    return launch_tiled_kernel<kTileWords, false>(g, scratch, schedule, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
