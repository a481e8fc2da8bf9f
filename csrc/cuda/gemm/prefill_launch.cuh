// The host side of one rate's prefill kernels; included by prefill_k*.cu only.
#pragma once

#include "launch.cuh"
#include "prefill.cuh"

namespace trellis::cuda {

template <int kTileWords, bool kMul1, int kRows>
cudaError_t launch_prefill_kernel(const Gemm& g, const TileScratch& scratch,
                                  const TileSchedule& schedule, cudaStream_t stream) {
  using Shape = PrefillShape<kTileWords, kRows>;
  return launch_overlapping(prefill_kernel<kTileWords, kMul1, kRows>,
                            static_cast<int64_t>(schedule.workers) * schedule.cluster,
                            Shape::kThreads, Shape::kBytes, schedule.cluster, stream, g, scratch,
                            schedule, hash_of(g.codebook), powers_of_two());
}

template <int kTileWords, bool kMul1>
cudaError_t launch_prefill_rows(const Gemm& g, const TileScratch& scratch,
                                const TileSchedule& schedule, cudaStream_t stream) {
  return schedule.rows == 128
             ? launch_prefill_kernel<kTileWords, kMul1, 128>(g, scratch, schedule, stream)
             : launch_prefill_kernel<kTileWords, kMul1, 256>(g, scratch, schedule, stream);
}

template <int kTileWords>
cudaError_t launch_prefill_rate(const Gemm& g, const TileScratch& scratch,
                                const TileSchedule& schedule, cudaStream_t stream) {
  if (g.codebook == 2) return launch_prefill_rows<kTileWords, true>(g, scratch, schedule, stream);
  if constexpr (kTileWords % 16 == 0)  // half rates exist for mul1 only, which the bindings check
    return launch_prefill_rows<kTileWords, false>(g, scratch, schedule, stream);
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
