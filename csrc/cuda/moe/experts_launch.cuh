// The host side of the products; included by experts_*.cu only, one file a kind, so that they compile in
// parallel.
#pragma once

#include "../gemm/launch.cuh"
#include "experts.cuh"

namespace trellis::cuda {

template <bool kDown, bool kExact, int kRowGroups>
cudaError_t launch_expert_kernel(const Moe& m, const MoeScratch& scratch, int grid,
                                 cudaStream_t stream) {
  using Shape = ExpertShape<kRowGroups, kExact ? 2 : 1>;
  // Half as many where a multiprocessor has room for one only.
  const int blocks = grid * Shape::kBlocks / 2;
  return launch_overlapping(expert_kernel<kDown, kExact, kRowGroups>, blocks, kExpertWarps * 32,
                            shared_for_even_spread(blocks, Shape::kShared), 1, stream, m, scratch);
}

template <int kRowGroups, bool kExact>
cudaError_t launch_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                           cudaStream_t stream) {
  return down ? launch_expert_kernel<true, kExact, kRowGroups>(m, scratch, grid, stream)
              : launch_expert_kernel<false, kExact, kRowGroups>(m, scratch, grid, stream);
}

}  // namespace trellis::cuda
