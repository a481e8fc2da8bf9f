// The mixture-of-experts ops for CPU tensors, in the manner of bindings.cpp.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "cpu/isa.h"
#include "cpu/moe.h"
#include "dtypes.h"
#include "moe_arguments.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using trellis::MoeArguments;

// Contiguous copies, kept alive.
class Kept {
 public:
  const void* pointer(const Tensor& t) {
    kept_.push_back(torch::stable::contiguous(t));
    return kept_.back().const_data_ptr();
  }

  trellis::Stack stack(const std::optional<Tensor>& t) {
    if (!t) return trellis::Stack{nullptr, trellis::DType::Half, 1, 0};
    return trellis::Stack{pointer(*t), trellis::dtype_of(t->scalar_type()), t->size(0), t->size(1)};
  }

 private:
  std::vector<Tensor> kept_;
};

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
  Kept kept;
  trellis::Moe m;
  m.x = kept.pointer(a.x);
  m.x_dtype = trellis::dtype_of(a.x.scalar_type());
  m.tokens = tokens;
  m.columns = a.x.size(a.x.dim() - 1);
  m.ids = kept.pointer(a.topk_ids);
  m.wide_ids = a.topk_ids.scalar_type() == ScalarType::Long;
  m.weights = kept.pointer(a.topk_weights);
  m.weights_dtype = trellis::dtype_of(a.topk_weights.scalar_type());
  m.top_k = a.top_k();
  m.packed = static_cast<const int16_t*>(kept.pointer(a.packed));
  m.packed_words = a.packed.size(0);
  m.table = static_cast<const int64_t*>(kept.pointer(a.table));
  m.experts = a.experts();
  m.slices = a.slices();
  m.gate = {kept.stack(a.gate_suh), kept.stack(a.gate_svh), kept.stack(a.gate_bias),
            static_cast<int>(a.gate_codebook)};
  m.up = {kept.stack(a.up_suh), kept.stack(a.up_svh), kept.stack(a.up_bias),
          static_cast<int>(a.up_codebook)};
  m.down = {kept.stack(a.down_suh), kept.stack(a.down_svh), kept.stack(a.down_bias),
            static_cast<int>(a.down_codebook)};
  m.hidden = a.hidden();
  m.inner = a.inner();
  m.intermediate = a.intermediate;
  m.activation = static_cast<int>(a.activation);
  m.limit = static_cast<float>(a.limit);
  m.limit_after = a.limit_after;
  m.routed_scale = static_cast<float>(a.routed_scale);
  m.y = y.mutable_data_ptr();
  m.y_dtype = trellis::dtype_of(a.out_dtype);
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

int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t /*slices*/,
                            int64_t hidden, int64_t intermediate, bool cuda) {
  TRELLIS_CHECK(!cuda, "moe_plan: this build has no CUDA kernel of rank_sliced_moe");
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
