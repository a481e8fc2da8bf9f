// Argument checks of the bindings, in the words of meta/checks.py: callers of torch.ops.trellis_ops
// that bypass the Python entries get the same message (as RuntimeError).
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

// Like STD_TORCH_CHECK, which would put the name of a C++ function and a line before the words.
// The parts of the message are evaluated only if it is needed.
#define TRELLIS_CHECK(condition, ...) \
  if (!(condition)) throw std::runtime_error(::trellis::checks::text(__VA_ARGS__))

namespace trellis::checks {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

inline const char* name_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Double:
      return "float64";
    case ScalarType::Short:
      return "int16";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Char:
      return "int8";
    case ScalarType::Byte:
      return "uint8";
    case ScalarType::Bool:
      return "bool";
    case ScalarType::UInt16:
      return "uint16";
    case ScalarType::UInt32:
      return "uint32";
    case ScalarType::UInt64:
      return "uint64";
    case ScalarType::ComplexHalf:
      return "complex32";
    case ScalarType::ComplexFloat:
      return "complex64";
    case ScalarType::ComplexDouble:
      return "complex128";
    case ScalarType::Float8_e4m3fn:
      return "float8_e4m3fn";
    case ScalarType::Float8_e5m2:
      return "float8_e5m2";
    default:
      return torch::headeronly::toString(dtype);
  }
}

inline std::string shape_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
  return text + "]";
}

inline std::string name_of(torch::stable::Device device) {
  using torch::headeronly::DeviceType;
  const int type = static_cast<int>(device.type());
  std::string name = device.type() == DeviceType::CPU    ? "cpu"
                     : device.type() == DeviceType::CUDA ? "cuda"
                     : device.type() == DeviceType::Meta ? "meta"
                                                         : "device type " + std::to_string(type);
  if (device.index() >= 0) name += ":" + std::to_string(device.index());
  return name;
}

inline bool is_activation(ScalarType dtype) {
  return dtype == ScalarType::Half || dtype == ScalarType::BFloat16 || dtype == ScalarType::Float;
}

inline void activation_dtype(const char* op, const char* name, const Tensor& t) {
  TRELLIS_CHECK(is_activation(t.scalar_type()), op, ": ", name, " has dtype ",
                name_of(t.scalar_type()), ", expected float16 or bfloat16 or float32");
}

inline void same_device(const char* op, const char* name, const Tensor& t, const char* base,
                        const Tensor& reference) {
  const bool same = t.device() == reference.device();
  TRELLIS_CHECK(same, op, ": ", name, " is on ", name_of(t.device()), ", expected ",
                name_of(reference.device()), " (the device of ", base, ")");
}

inline void out_dtype(const char* op, const char* name, ScalarType dtype) {
  TRELLIS_CHECK(is_activation(dtype), op, ": ", name, " is ", name_of(dtype),
                ", expected float16 or bfloat16 or float32");
}

inline const char* codebook_name(int64_t codebook) {
  static const char* const names[] = {"3inst", "mcg", "mul1", "sqg_e4m3", "sqg_fp16"};
  return names[codebook];
}

inline void tile_words(const char* op, const char* name, int64_t words, int64_t codebook) {
  const bool half = words == 24 || words == 40 || words == 56;
  TRELLIS_CHECK(half || (words % 16 == 0 && words >= 16 && words <= 128), op, ": ", name, " has ",
                words,
                " words per tile, expected 16 * bits with bits from 1 to 8, or 24, 40 or 56");
  TRELLIS_CHECK(codebook >= 0 && codebook < 5, op, ": codebook is ", codebook, ", expected 0 to 4");
  TRELLIS_CHECK(!half || codebook == 2, op, ": codebook ", codebook_name(codebook), " at ",
                words / 16, ".5 bits, expected mul1: half rates exist for mul1 only");
  const bool e4m3 = codebook == 3 && (words < 32 || words > 96);
  TRELLIS_CHECK(!e4m3, op, ": codebook sqg_e4m3 at ", words / 16,
                " bits, expected bits in 2, 3, 4, 5, 6");
  const bool fp16 = codebook == 4 && words != 80 && words != 96;
  TRELLIS_CHECK(!fp16, op, ": codebook sqg_fp16 at ", words / 16, " bits, expected bits in 5, 6");
}

inline void trellis(const char* op, const Tensor& t, int64_t codebook) {
  TRELLIS_CHECK(t.scalar_type() == ScalarType::Short, op, ": trellis has dtype ",
                name_of(t.scalar_type()), ", expected int16");
  TRELLIS_CHECK(t.dim() == 3, op, ": trellis has ", t.dim(),
                " dimensions, expected 3: [in/16, out/16, 16*bits]");
  tile_words(op, "trellis", t.size(2), codebook);
}

inline void scale(const char* op, const char* name, const std::optional<Tensor>& vector,
                  const Tensor& trellis, int axis) {
  if (!vector) return;
  const char* side = axis == 0 ? "in" : "out";
  const int64_t features = trellis.size(axis) * 16;
  TRELLIS_CHECK(vector->scalar_type() == ScalarType::Half, op, ": ", name, " has dtype ",
                name_of(vector->scalar_type()), ", expected float16");
  TRELLIS_CHECK(vector->dim() == 1 && vector->size(0) == features, op, ": ", name, " has shape ",
                shape_of(*vector), ", expected [", features, "] (", side,
                "_features of the trellis)");
  TRELLIS_CHECK(features % 128 == 0, op, ": trellis has ", features, " ", side,
                "_features, expected a multiple of 128 where ", name, " is given");
  same_device(op, name, *vector, "trellis", trellis);
}

inline void activations(const char* op, const char* name, const Tensor& x, const Tensor& trellis) {
  activation_dtype(op, name, x);
  TRELLIS_CHECK(x.dim() >= 1, op, ": ", name, " has 0 dimensions, expected at least 1");
  same_device(op, "trellis", trellis, name, x);
  const int64_t full = trellis.size(0) * 16, columns = x.size(x.dim() - 1);
  TRELLIS_CHECK(columns <= full && columns > full - 128, op, ": ", name, " has ", columns,
                " columns, expected ", full > 127 ? full - 127 : 1, " to ", full,
                " (in_features of the trellis is ", full, ")");
}

inline void out_features(const char* op, int64_t got, const Tensor& trellis) {
  const int64_t full = trellis.size(1) * 16;
  TRELLIS_CHECK(got <= full && got > full - 128 && got >= 1, op, ": out_features is ", got,
                ", expected ", full > 127 ? full - 127 : 1, " to ", full);
}

inline void bias(const char* op, const std::optional<Tensor>& vector, int64_t out_features,
                 const Tensor& x, const Tensor& trellis) {
  if (!vector) return;
  activation_dtype(op, "bias", *vector);
  const int64_t full = trellis.size(1) * 16;
  const bool right =
      vector->dim() == 1 && (vector->size(0) == out_features || vector->size(0) == full);
  const std::string alternative =
      full != out_features ? " or [" + std::to_string(full) + "]" : std::string();
  TRELLIS_CHECK(right, op, ": bias has shape ", shape_of(*vector), ", expected [", out_features,
                "]", alternative);
  same_device(op, "bias", *vector, "x", x);
}

inline void gemm(const char* op, const Tensor& x, const Tensor& packed,
                 const std::optional<Tensor>& suh, const std::optional<Tensor>& svh,
                 const std::optional<Tensor>& added, int64_t codebook, int64_t features,
                 ScalarType dtype) {
  trellis(op, packed, codebook);
  scale(op, "suh", suh, packed, 0);
  scale(op, "svh", svh, packed, 1);
  activations(op, "x", x, packed);
  out_features(op, features, packed);
  bias(op, added, features, x, packed);
  out_dtype(op, "out_dtype", dtype);
}

inline void act(const char* op, int64_t got, int64_t codebook) {
  TRELLIS_CHECK(got == 0 || got == 1, op, ": act is ", got, ", expected 0 to 1");
  TRELLIS_CHECK(got == 0 || codebook == 2, op, ": act int8 with codebook ", codebook_name(codebook),
                ", expected mul1");
}

inline void dequantize(const char* op, const Tensor& packed, const std::optional<Tensor>& suh,
                       const std::optional<Tensor>& svh, int64_t codebook, ScalarType dtype) {
  trellis(op, packed, codebook);
  scale(op, "suh", suh, packed, 0);
  scale(op, "svh", svh, packed, 1);
  out_dtype(op, "dtype", dtype);
}

inline void hadamard(const char* op, const Tensor& x) {
  activation_dtype(op, "x", x);
  const bool whole = x.dim() >= 1 && x.size(x.dim() - 1) % 128 == 0;
  TRELLIS_CHECK(whole, op, ": x has shape ", shape_of(x),
                ", expected a last dimension that is a multiple of 128");
}

inline std::vector<int64_t> sizes_of(const Tensor& x) {
  std::vector<int64_t> sizes;
  for (int64_t i = 0; i < x.dim(); ++i) sizes.push_back(x.size(i));
  return sizes;
}

// Of all leading dimensions together.
inline int64_t rows_of(const Tensor& x) {
  int64_t rows = 1;
  for (int64_t i = 0; i + 1 < x.dim(); ++i) rows *= x.size(i);
  return rows;
}

}  // namespace trellis::checks
