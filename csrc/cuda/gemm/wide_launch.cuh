// The host side of one rate's wide kernels; included by wide_k*.cu only.
#pragma once

#include "launch.cuh"
#include "wide.cuh"

namespace trellis::cuda {

template <int kTileWords, int kCodebook, int kRows>
cudaError_t launch_wide_kernel(const Gemm& g, const TileScratch& scratch,
                               const TileSchedule& schedule, cudaStream_t stream) {
  using Shape = WideShape<kTileWords, kRows>;
  return launch_overlapping(wide_kernel<kTileWords, kCodebook, kRows>,
                            static_cast<int64_t>(schedule.workers) * schedule.cluster,
                            Shape::kThreads, Shape::kBytes, schedule.cluster, stream, g, scratch,
                            schedule, powers_of_two());
}

template <int kTileWords>
cudaError_t launch_wide_rate(const Gemm& g, const TileScratch& scratch,
                             const TileSchedule& schedule, cudaStream_t stream) {
  return with_codebook<kTileWords>(g.codebook, [&](auto codebook) {
    constexpr int kCodebook = decltype(codebook)::value;
    switch (schedule.rows) {
      case 64:
        return launch_wide_kernel<kTileWords, kCodebook, 64>(g, scratch, schedule, stream);
      case 128:
        return launch_wide_kernel<kTileWords, kCodebook, 128>(g, scratch, schedule, stream);
      default:
        return launch_wide_kernel<kTileWords, kCodebook, 256>(g, scratch, schedule, stream);
    }
  });
}

}  // namespace trellis::cuda
