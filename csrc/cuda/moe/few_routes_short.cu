#include "few_routes_launch.cuh"

namespace trellis::cuda {
template cudaError_t launch_few_products<false>(bool, const Moe&, const FewScratch&, const FewPlan&,
                                                cudaStream_t);
}  // namespace trellis::cuda
