// The launches before and after the products, in their order.
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

}  // namespace trellis::cuda
