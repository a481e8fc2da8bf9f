// The host side of one rate's wide kernels; included by wide_k*.cu only.
#pragma once

#include "launch.cuh"
#include "wide.cuh"

namespace trellis::cuda {

template <int kTileWords, bool kMul1, int kRows>
cudaError_t launch_wide_kernel(const Gemm& g, const TileScratch& scratch,
                               const TileSchedule& schedule, cudaStream_t stream) {
  using Shape = WideShape<kTileWords, kRows>;
  return launch_overlapping(wide_kernel<kTileWords, kMul1, kRows>,
                            static_cast<int64_t>(schedule.workers) * schedule.cluster,
                            Shape::kThreads, Shape::kBytes, schedule.cluster, stream, g, scratch,
                            schedule, hash_of(g.codebook), powers_of_two());
}

template <int kTileWords, bool kMul1>
cudaError_t launch_wide_rows(const Gemm& g, const TileScratch& scratch,
                             const TileSchedule& schedule, cudaStream_t stream) {
  switch (schedule.rows) {
    case 64:
      return launch_wide_kernel<kTileWords, kMul1, 64>(g, scratch, schedule, stream);
    case 128:
      return launch_wide_kernel<kTileWords, kMul1, 128>(g, scratch, schedule, stream);
    default:
      return launch_wide_kernel<kTileWords, kMul1, 256>(g, scratch, schedule, stream);
  }
}

template <int kTileWords>
cudaError_t launch_wide_rate(const Gemm& g, const TileScratch& scratch,
                             const TileSchedule& schedule, cudaStream_t stream) {
  if (g.codebook == 2) return launch_wide_rows<kTileWords, true>(g, scratch, schedule, stream);
  if constexpr (kTileWords % 16 == 0)  // half rates exist for mul1 only, which the bindings check
    return launch_wide_rows<kTileWords, false>(g, scratch, schedule, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
