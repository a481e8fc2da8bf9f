// The launches before and after the products, in their order, and the products of tiles.
#pragma once

#include "plan.h"

namespace trellis::cuda {

cudaError_t launch_sort(const Moe& m, const MoeScratch& scratch, cudaStream_t stream);
// `terms`: FP16 numbers for each value.
cudaError_t launch_rotate_routes(const Moe& m, const MoeScratch& scratch, int terms,
                                 cudaStream_t stream);
// The same for tiles of many rows, with the activation as a launch of its own.
cudaError_t launch_rotate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                cudaStream_t stream);
cudaError_t launch_activate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                  cudaStream_t stream);
cudaError_t launch_add_slots(const Moe& m, const MoeScratch& scratch, cudaStream_t stream);

cudaError_t launch_add(const Moe& m, const MoeScratch& scratch, cudaStream_t stream);

// Gate and up, or down, by `grid` thread blocks; instantiated in tiles_*.cu, wide_tiles_*.cu and tall_tiles_*.cu.
template <int kTerms>
cudaError_t launch_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                                    cudaStream_t stream);
template <int kTerms>
cudaError_t launch_wide_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream);
template <int kTerms>
cudaError_t launch_tall_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch,
                                         int grid, cudaStream_t stream);

}  // namespace trellis::cuda
