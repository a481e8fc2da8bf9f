// The mixture-of-experts ops for CUDA tensors, in the manner of cuda_bindings.cpp.
#ifdef TRELLIS_CUDA

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>

#include "cuda/moe/plan.h"
#include "cuda_calls.h"
#include "moe_arguments.h"

namespace trellis::cuda {

// On whichever device has most multiprocessors.
int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t slices,
                            int64_t hidden, int64_t inner) {
  int devices = 0, sm_count = 0;
  cudaGetDeviceCount(&devices);
  for (int device = 0; device < devices; ++device)
    sm_count = std::max(sm_count, attribute(cudaDevAttrMultiProcessorCount, device));
  TRELLIS_CHECK(sm_count > 0, "moe_plan: device is cuda, but no GPU was found");
  return moe_plan(tokens, top_k, experts, slices, hidden, inner, sm_count).bytes;
}

}  // namespace trellis::cuda

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using trellis::MoeArguments;
using trellis::cuda::FewRoutes;

// The exact and slow op, in Python, through the dispatcher.
Tensor parity_moe(TRELLIS_MOE_PARAMETERS) {
  const auto stack_of = [](const auto&... arguments) {
    return std::array<StableIValue, sizeof...(arguments)>{
        torch::stable::detail::from(arguments)...};
  };
  auto stack = stack_of(TRELLIS_MOE_ARGUMENTS);
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("trellis_ops::parity_moe", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// `wgmma`: whether tiles may use it. Only tests say that they may not, or which way few routes go.
Tensor run(const MoeArguments& a, const std::optional<Tensor>& workspace, bool wgmma = true,
           FewRoutes few_routes = FewRoutes::WhereBest) {
  const char* op = "rank_sliced_moe";
  const torch::stable::accelerator::DeviceGuard guard(a.x.get_device_index());
  const int32_t device = a.x.get_device_index();
  const int64_t tokens = a.tokens();
  const trellis::cuda::Gpu gpu = trellis::cuda::gpu_of(device);
  trellis::cuda::MoePlan plan = trellis::cuda::moe_plan(tokens, a.top_k(), a.experts(), a.slices(),
                                                        a.hidden(), a.inner(), gpu.sm_count);
  plan.wgmma = wgmma && trellis::cuda::can_run(trellis::cuda::Route::Wide128, gpu);
  plan.few_routes = few_routes;
  if (workspace) {
    trellis::checks::workspace(op, *workspace, a.x);
    TRELLIS_CHECK(workspace->numel() >= plan.bytes, op, ": workspace has ", workspace->numel(),
                  " bytes, expected at least ", plan.bytes, " for ", tokens, " tokens");
    TRELLIS_CHECK(reinterpret_cast<uintptr_t>(workspace->const_data_ptr()) % 128 == 0, op,
                  ": workspace begins between two multiples of 128 bytes, expected at one");
  }
  Tensor y = torch::stable::new_empty(a.x, trellis::checks::sizes_of(a.x), a.out_dtype);
  if (tokens == 0) return y;
  MoeArguments aligned = a;
  aligned.packed = trellis::cuda::aligned(a.packed);
  aligned.table = trellis::cuda::aligned(a.table);
  trellis::Kept kept;
  const trellis::Moe m = trellis::moe_of(aligned, y, kept);
  Tensor scratch =
      workspace ? *workspace : torch::stable::new_empty(a.x, {plan.bytes}, ScalarType::Byte);
  trellis::cuda::check_launch(op, trellis::cuda::launch_moe(m, plan, scratch.mutable_data_ptr(),
                                                            trellis::cuda::current_stream(device)));
  return y;
}

// The sqg codebooks have no CUDA kernel yet.
bool has_kernel(const MoeArguments& a) {
  return a.up_codebook <= 2 && a.down_codebook <= 2 && (!a.gate_suh || a.gate_codebook <= 2);
}

Tensor rank_sliced_moe(TRELLIS_MOE_PARAMETERS) {
  const MoeArguments a{TRELLIS_MOE_ARGUMENTS};
  trellis::checks::moe("rank_sliced_moe", a);
  return has_kernel(a) ? run(a, std::nullopt) : parity_moe(TRELLIS_MOE_ARGUMENTS);
}

Tensor rank_sliced_moe_planned(TRELLIS_MOE_PARAMETERS, Tensor workspace) {
  const MoeArguments a{TRELLIS_MOE_ARGUMENTS};
  trellis::checks::moe("rank_sliced_moe", a);
  return has_kernel(a) ? run(a, workspace) : parity_moe(TRELLIS_MOE_ARGUMENTS);
}

Tensor rank_sliced_moe_route(TRELLIS_MOE_PARAMETERS, bool wgmma, bool few_routes) {
  const MoeArguments a{TRELLIS_MOE_ARGUMENTS};
  trellis::checks::moe("rank_sliced_moe", a);
  TRELLIS_CHECK(has_kernel(a), "rank_sliced_moe: no CUDA kernel for this codebook");
  return run(a, std::nullopt, wgmma, few_routes ? FewRoutes::WhereTheyCan : FewRoutes::Never);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CUDA, m) {
  m.impl("rank_sliced_moe", TORCH_BOX(&rank_sliced_moe));
  m.impl("rank_sliced_moe_inference", TORCH_BOX(&rank_sliced_moe));
  m.impl("rank_sliced_moe_planned", TORCH_BOX(&rank_sliced_moe_planned));
  m.impl("_rank_sliced_moe_route", TORCH_BOX(&rank_sliced_moe_route));
}

#endif  // TRELLIS_CUDA
