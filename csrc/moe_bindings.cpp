// The mixture-of-experts ops for CPU tensors, in the manner of bindings.cpp.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "cpu/isa.h"
#include "cpu/moe.h"
#include "moe_arguments.h"

#ifdef TRELLIS_CUDA
namespace trellis::cuda {
int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t slices,
                            int64_t hidden, int64_t inner);  // cuda_moe_bindings.cpp
}
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using trellis::MoeArguments;

Tensor run(const MoeArguments& a, const std::optional<Tensor>& workspace, int64_t isa) {
  const char* op = "rank_sliced_moe";
  trellis::checks::moe(op, a);
  const int64_t tokens = a.tokens();
  const int64_t bytes =
      trellis::moe_workspace_bytes(tokens, a.top_k(), a.experts(), a.hidden(), a.inner());
  if (workspace) {
    trellis::checks::workspace(op, *workspace, a.x);
    TRELLIS_CHECK(workspace->numel() >= bytes, op, ": workspace has ", workspace->numel(),
                  " bytes, expected at least ", bytes, " for ", tokens, " tokens");
  }
  TRELLIS_CHECK(isa >= 0 && isa < 63 && (trellis::available_isas() >> isa & 1), op, ": isa is ",
                isa, ", expected one that this machine can run");

  Tensor y = torch::stable::new_empty(a.x, trellis::checks::sizes_of(a.x), a.out_dtype);
  if (tokens == 0) return y;
  trellis::Kept kept;
  const trellis::Moe m = trellis::moe_of(a, y, kept);
  Tensor scratch =
      workspace ? *workspace : torch::stable::new_empty(a.x, {bytes}, ScalarType::Byte);
  trellis::moe(static_cast<trellis::Isa>(isa), m, scratch.mutable_data_ptr());
  return y;
}

Tensor rank_sliced_moe(TRELLIS_MOE_PARAMETERS) {
  return run(MoeArguments{TRELLIS_MOE_ARGUMENTS}, std::nullopt, trellis::best_isa());
}

Tensor rank_sliced_moe_planned(TRELLIS_MOE_PARAMETERS, Tensor workspace) {
  return run(MoeArguments{TRELLIS_MOE_ARGUMENTS}, workspace, trellis::best_isa());
}

Tensor rank_sliced_moe_isa(TRELLIS_MOE_PARAMETERS, int64_t isa) {
  return run(MoeArguments{TRELLIS_MOE_ARGUMENTS}, std::nullopt, isa);
}

int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts,
                            [[maybe_unused]] int64_t slices, int64_t hidden, int64_t intermediate,
                            bool cuda) {
  if (cuda) {
#ifdef TRELLIS_CUDA
    return trellis::cuda::moe_workspace_bytes(tokens, top_k, experts, slices, hidden, intermediate);
#else
    TRELLIS_CHECK(false, "moe_plan: this build has no CUDA kernel of rank_sliced_moe");
#endif
  }
  return trellis::moe_workspace_bytes(tokens, top_k, experts, hidden, intermediate);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CPU, m) {
  m.impl("rank_sliced_moe", TORCH_BOX(&rank_sliced_moe));
  m.impl("rank_sliced_moe_inference", TORCH_BOX(&rank_sliced_moe));
  m.impl("rank_sliced_moe_planned", TORCH_BOX(&rank_sliced_moe_planned));
  m.impl("_rank_sliced_moe_isa", TORCH_BOX(&rank_sliced_moe_isa));
}

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CompositeExplicitAutograd, m) {
  m.impl("_moe_workspace_bytes", TORCH_BOX(&moe_workspace_bytes));
}
