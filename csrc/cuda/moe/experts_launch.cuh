// The host side of the products; included by experts_*.cu only, one file a kind, so that they compile in
// parallel.
#pragma once

#include "../gemm/launch.cuh"
#include "experts.cuh"

namespace trellis::cuda {

template <bool kDown, bool kExact, int kRowGroups>
cudaError_t launch_expert_kernel(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  using Shape = ExpertShape<kRowGroups, kExact ? 2 : 1>;
  return launch_overlapping(expert_kernel<kDown, kExact, kRowGroups>, scratch.grid,
                            kExpertWarps * 32, shared_for_even_spread(scratch.grid, Shape::kShared),
                            1, stream, m, scratch);
}

template <int kRowGroups, bool kExact>
cudaError_t launch_experts(bool down, const Moe& m, const MoeScratch& scratch,
                           cudaStream_t stream) {
  return down ? launch_expert_kernel<true, kExact, kRowGroups>(m, scratch, stream)
              : launch_expert_kernel<false, kExact, kRowGroups>(m, scratch, stream);
}

}  // namespace trellis::cuda
