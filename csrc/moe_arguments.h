// The arguments that the mixture-of-experts ops have in common, and their checks in the words of
// meta/moe_checks.py.
#pragma once

#include <cmath>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "checks.h"
#include "cpu/moe.h"
#include "dtypes.h"

// In the order of the schema: as parameters of a function, and as the members of MoeArguments.
#define TRELLIS_MOE_PARAMETERS                                                               \
  Tensor x, Tensor topk_ids, Tensor topk_weights, Tensor packed, Tensor table,               \
      std::optional<Tensor> gate_suh, std::optional<Tensor> gate_svh, Tensor up_suh,         \
      Tensor up_svh, Tensor down_suh, Tensor down_svh, std::optional<Tensor> gate_bias,      \
      std::optional<Tensor> up_bias, std::optional<Tensor> down_bias, int64_t gate_codebook, \
      int64_t up_codebook, int64_t down_codebook, int64_t intermediate, int64_t activation,  \
      double limit, bool limit_after, double routed_scale, ScalarType out_dtype
#define TRELLIS_MOE_ARGUMENTS                                                             \
  x, topk_ids, topk_weights, packed, table, gate_suh, gate_svh, up_suh, up_svh, down_suh, \
      down_svh, gate_bias, up_bias, down_bias, gate_codebook, up_codebook, down_codebook, \
      intermediate, activation, limit, limit_after, routed_scale, out_dtype

namespace trellis {

struct MoeArguments {
  torch::stable::Tensor x, topk_ids, topk_weights, packed, table;
  std::optional<torch::stable::Tensor> gate_suh, gate_svh;
  torch::stable::Tensor up_suh, up_svh, down_suh, down_svh;
  std::optional<torch::stable::Tensor> gate_bias, up_bias, down_bias;
  int64_t gate_codebook, up_codebook, down_codebook;
  int64_t intermediate, activation;
  double limit;
  bool limit_after;
  double routed_scale;
  torch::headeronly::ScalarType out_dtype;

  int64_t tokens() const { return checks::rows_of(x); }
  int64_t top_k() const { return topk_ids.size(topk_ids.dim() - 1); }
  int64_t experts() const { return table.size(1); }
  int64_t slices() const { return table.size(2); }
  int64_t hidden() const { return up_suh.size(1); }  // padded
  int64_t inner() const { return up_svh.size(1); }   // of a slice, padded
};

namespace checks {

// A tensor beside x: dtype, then device.
inline void beside(const char* op, const char* name, const Tensor& t, const Tensor& x,
                   std::initializer_list<ScalarType> dtypes) {
  bool right = false;
  std::string wanted;
  for (const ScalarType dtype : dtypes) {
    right = right || t.scalar_type() == dtype;
    wanted += (wanted.empty() ? "" : " or ") + std::string(name_of(dtype));
  }
  TRELLIS_CHECK(right, op, ": ", name, " has dtype ", name_of(t.scalar_type()), ", expected ",
                wanted);
  same_device(op, name, t, "x", x);
}

inline void routes(const char* op, const MoeArguments& a) {
  activation_dtype(op, "x", a.x);
  TRELLIS_CHECK(a.x.dim() >= 1, op, ": x has 0 dimensions, expected at least 1");
  beside(op, "topk_ids", a.topk_ids, a.x, {ScalarType::Int, ScalarType::Long});
  beside(op, "topk_weights", a.topk_weights, a.x,
         {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  bool right = a.topk_ids.dim() == a.x.dim();
  std::string leading = "[";
  for (int64_t i = 0; i + 1 < a.x.dim(); ++i) {
    right = right && a.topk_ids.size(i) == a.x.size(i);
    leading += (i ? ", " : "") + std::to_string(a.x.size(i));
  }
  TRELLIS_CHECK(right && a.top_k() >= 1, op, ": topk_ids has shape ", shape_of(a.topk_ids),
                ", expected x's ", leading, "] and a last dimension top_k");
  TRELLIS_CHECK(sizes_of(a.topk_weights) == sizes_of(a.topk_ids), op, ": topk_weights has shape ",
                shape_of(a.topk_weights), ", expected ", shape_of(a.topk_ids),
                " (that of topk_ids)");
}

// A size that others are measured by: whole Hadamard blocks.
inline void padded_vectors(const char* op, const char* name, const Tensor& t, const Tensor& x) {
  beside(op, name, t, x, {ScalarType::Half});
  TRELLIS_CHECK(t.dim() == 2 && t.size(1) % 128 == 0 && t.size(1) >= 1, op, ": ", name,
                " has shape ", shape_of(t), ", expected [n, a multiple of 128]");
}

inline void vectors(const char* op, const char* name, const std::optional<Tensor>& t,
                    const MoeArguments& a, int64_t size) {
  if (!t) return;
  beside(op, name, *t, a.x, {ScalarType::Half});
  const int64_t all = a.experts() * a.slices(), slices = a.slices();
  const int64_t rows = t->dim() == 2 ? t->size(0) : -1;
  std::string wanted = std::to_string(all);
  if (slices != all) wanted += " or " + std::to_string(slices);
  if (slices != 1) wanted += " or 1";
  TRELLIS_CHECK(rows >= 1 && t->size(1) == size && (rows == all || rows == slices || rows == 1), op,
                ": ", name, " has shape ", shape_of(*t), ", expected [n, ", size,
                "] with n = ", wanted);
}

inline void stacked_bias(const char* op, const char* name, const std::optional<Tensor>& t,
                         const MoeArguments& a, int64_t rows, int64_t size) {
  if (!t) return;
  beside(op, name, *t, a.x, {ScalarType::Half, ScalarType::BFloat16, ScalarType::Float});
  const bool right = t->dim() == 2 && t->size(0) == rows && t->size(1) == size;
  TRELLIS_CHECK(right, op, ": ", name, " has shape ", shape_of(*t), ", expected [", rows, ", ",
                size, "]");
}

inline void moe(const char* op, const MoeArguments& a) {
  static const char* const names[] = {"silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai"};
  TRELLIS_CHECK(a.activation >= 0 && a.activation < 5, op, ": activation is ", a.activation,
                ", expected 0 to 4");
  const char* const activation = names[a.activation];
  const bool relu2 = a.activation == kRelu2;
  routes(op, a);
  beside(op, "packed", a.packed, a.x, {ScalarType::Short});
  TRELLIS_CHECK(a.packed.dim() == 1, op, ": packed has shape ", shape_of(a.packed),
                ", expected [words]");
  beside(op, "table", a.table, a.x, {ScalarType::Long});
  TRELLIS_CHECK(
      a.table.dim() == 4 && a.table.size(0) == 3 && a.table.size(3) == 2 && a.table.numel() > 0, op,
      ": table has shape ", shape_of(a.table), ", expected [3, experts, slices, 2]");

  const auto presence = [&](const char* name, const std::optional<Tensor>& t) {
    TRELLIS_CHECK(t.has_value() != relu2, op, ": ", name, " is ", t ? "a Tensor" : "None",
                  ", expected ", relu2 ? "None" : "a Tensor", " for ", activation);
  };
  presence("gate_suh", a.gate_suh);
  presence("gate_svh", a.gate_svh);
  TRELLIS_CHECK(!a.gate_bias || !relu2, op, ": gate_bias is a Tensor, expected None for ",
                activation);
  padded_vectors(op, "up_suh", a.up_suh, a.x);
  padded_vectors(op, "up_svh", a.up_svh, a.x);
  const int64_t hidden = a.hidden(), inner = a.inner();
  vectors(op, "up_suh", a.up_suh, a, hidden);
  vectors(op, "up_svh", a.up_svh, a, inner);
  vectors(op, "gate_suh", a.gate_suh, a, hidden);
  vectors(op, "gate_svh", a.gate_svh, a, inner);
  vectors(op, "down_suh", a.down_suh, a, inner);
  vectors(op, "down_svh", a.down_svh, a, hidden);
  stacked_bias(op, "gate_bias", a.gate_bias, a, a.experts() * a.slices(), inner);
  stacked_bias(op, "up_bias", a.up_bias, a, a.experts() * a.slices(), inner);
  stacked_bias(op, "down_bias", a.down_bias, a, a.experts(), hidden);

  const int64_t columns = a.x.size(a.x.dim() - 1);
  TRELLIS_CHECK(columns <= hidden && columns > hidden - 128, op, ": x has ", columns,
                " columns, expected ", hidden - 127, " to ", hidden,
                " (the experts' hidden size is ", hidden, ")");
  const auto codebook = [&](const char* name, int64_t code) {
    TRELLIS_CHECK(code >= 0 && code < 5, op, ": ", name, " is ", code, ", expected 0 to 4");
  };
  codebook("gate_codebook", a.gate_codebook);
  codebook("up_codebook", a.up_codebook);
  codebook("down_codebook", a.down_codebook);
  TRELLIS_CHECK(a.intermediate <= inner && a.intermediate > inner - 128 && a.intermediate >= 1, op,
                ": intermediate is ", a.intermediate, ", expected ", inner - 127, " to ", inner);
  TRELLIS_CHECK(a.slices() == 1 || a.intermediate == inner, op, ": intermediate is ",
                a.intermediate, ", expected ", inner, " (all of a slice, as there are ", a.slices(),
                " slices)");
  TRELLIS_CHECK(a.limit >= 0.0 && std::isfinite(a.limit) && (a.limit == 0.0 || !relu2), op,
                ": limit is ", a.limit, ", expected ",
                relu2 ? "0 for relu2" : "0 or a finite positive number");
  TRELLIS_CHECK(!a.limit_after || (!relu2 && a.activation != kSwigluOai), op,
                ": limit_after is True, expected False for ", activation);
  TRELLIS_CHECK(std::isfinite(a.routed_scale), op, ": routed_scale is ", a.routed_scale,
                ", expected a finite number");
  out_dtype(op, "out_dtype", a.out_dtype);
}

// How large it must be is for each device to say.
inline void workspace(const char* op, const Tensor& t, const Tensor& x) {
  beside(op, "workspace", t, x, {ScalarType::Byte});
  TRELLIS_CHECK(t.dim() == 1 && t.is_contiguous(), op, ": workspace has shape ", shape_of(t),
                " and strides [", t.dim() == 1 ? std::to_string(t.stride(0)) : "...",
                "], expected [bytes], contiguous");
}

}  // namespace checks

// Contiguous copies, kept alive.
class Kept {
  using Tensor = torch::stable::Tensor;

 public:
  const void* pointer(const Tensor& t) {
    kept_.push_back(torch::stable::contiguous(t));
    return kept_.back().const_data_ptr();
  }

  Stack stack(const std::optional<Tensor>& t) {
    if (!t) return Stack{nullptr, DType::Half, 1, 0};
    return Stack{pointer(*t), dtype_of(t->scalar_type()), t->size(0), t->size(1)};
  }

 private:
  std::vector<Tensor> kept_;
};

// The arguments as kernels see them, which write to y.
inline Moe moe_of(const MoeArguments& a, torch::stable::Tensor& y, Kept& kept) {
  Moe m;
  m.x = kept.pointer(a.x);
  m.x_dtype = dtype_of(a.x.scalar_type());
  m.tokens = a.tokens();
  m.columns = a.x.size(a.x.dim() - 1);
  m.ids = kept.pointer(a.topk_ids);
  m.wide_ids = a.topk_ids.scalar_type() == torch::headeronly::ScalarType::Long;
  m.weights = kept.pointer(a.topk_weights);
  m.weights_dtype = dtype_of(a.topk_weights.scalar_type());
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
  m.y_dtype = dtype_of(a.out_dtype);
  return m;
}

}  // namespace trellis
