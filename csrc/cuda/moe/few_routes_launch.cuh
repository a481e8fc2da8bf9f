// The host side of both products; included by few_routes_*.cu only, which compile in parallel.
#pragma once

#include "../gemm/launch.cuh"
#include "few_routes.cuh"

namespace trellis::cuda {

template <bool kExact>
cudaError_t launch_few_products(bool down, const Moe& m, const FewScratch& scratch,
                                const FewPlan& plan, cudaStream_t stream) {
  return launch_overlapping(
      down ? few_routes_kernel<true, kExact> : few_routes_kernel<false, kExact>,
      plan.blocks_of_sm * attribute(cudaDevAttrMultiProcessorCount), kExpertWarps * 32,
      plan.shared_bytes, 1, stream, m, scratch, plan.rows);
}

}  // namespace trellis::cuda
