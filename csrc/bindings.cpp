// torch.ops.trellis_ops on the LibTorch stable ABI: checks, contiguous inputs, allocation, dispatch.
// Schemas live in Python (meta/schemas.py); this file only implements them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "checks.h"
#include "cpu/codebook.h"
#include "cpu/isa.h"
#include "cpu/layer.h"
#include "cpu/search.h"
#include "dtypes.h"
#include "parallel.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using trellis::dtype_of;

// The matrix as kernels see it; `kept` holds the contiguous copies alive.
trellis::Matrix matrix_of(const Tensor& packed, const std::optional<Tensor>& suh,
                          const std::optional<Tensor>& svh, int64_t codebook,
                          std::vector<Tensor>& kept) {
  const auto keep = [&kept](const Tensor& t) {
    kept.push_back(torch::stable::contiguous(t));
    return kept.back().const_data_ptr();
  };
  trellis::Matrix w;
  w.trellis = static_cast<const int16_t*>(keep(packed));
  w.in_tiles = packed.size(0);
  w.out_tiles = packed.size(1);
  w.tile_words = static_cast<int>(packed.size(2));
  w.codebook = static_cast<int>(codebook);
  w.values = trellis::codebook_values(static_cast<int>(codebook), w.tile_words / 16);
  w.suh = suh ? static_cast<const uint16_t*>(keep(*suh)) : nullptr;
  w.svh = svh ? static_cast<const uint16_t*>(keep(*svh)) : nullptr;
  return w;
}

void check_isa(const char* op, int64_t isa) {
  TRELLIS_CHECK(isa >= 0 && isa < 63 && (trellis::available_isas() >> isa & 1), op, ": isa is ",
                isa, ", expected one that this machine can run");
}

Tensor run_gemm(Tensor x, Tensor packed, std::optional<Tensor> suh, std::optional<Tensor> svh,
                std::optional<Tensor> bias, int64_t codebook, int64_t out_features,
                ScalarType out_dtype, trellis::Act act, int64_t isa) {
  const char* op = "trellis_gemm";
  trellis::checks::gemm(op, x, packed, suh, svh, bias, codebook, out_features, out_dtype);
  trellis::checks::act(op, act, codebook);
  check_isa(op, isa);

  std::vector<Tensor> kept;
  const trellis::Matrix w = matrix_of(packed, suh, svh, codebook, kept);
  kept.push_back(torch::stable::contiguous(x));
  const Tensor& rows = kept.back();
  std::vector<int64_t> shape = trellis::checks::sizes_of(x);
  shape.back() = out_features;
  Tensor out = torch::stable::new_empty(x, shape, out_dtype);
  const int64_t count = trellis::checks::rows_of(x);
  if (count == 0) return out;
  const trellis::SlabKernels& kernels =
      trellis::slab_kernels(static_cast<trellis::Isa>(isa), act, count);
  Tensor scratch = torch::stable::new_empty(x, {trellis::gemm_scratch_floats(kernels, w, count)},
                                            ScalarType::Float);
  const trellis::Rows view{rows.const_data_ptr(), dtype_of(x.scalar_type()), count,
                           x.size(x.dim() - 1)};
  Tensor added = bias ? torch::stable::contiguous(*bias) : Tensor();
  trellis::gemm(kernels, w, view, bias ? added.const_data_ptr() : nullptr,
                bias ? dtype_of(bias->scalar_type()) : trellis::DType::Float,
                static_cast<float*>(scratch.mutable_data_ptr()), out.mutable_data_ptr(),
                dtype_of(out_dtype), out_features);
  return out;
}

Tensor trellis_gemm(Tensor x, Tensor packed, std::optional<Tensor> suh, std::optional<Tensor> svh,
                    std::optional<Tensor> bias, int64_t codebook, int64_t out_features,
                    ScalarType out_dtype) {
  return run_gemm(x, packed, suh, svh, bias, codebook, out_features, out_dtype, trellis::kExact,
                  trellis::best_isa());
}

Tensor trellis_gemm_act(Tensor x, Tensor packed, std::optional<Tensor> suh,
                        std::optional<Tensor> svh, std::optional<Tensor> bias, int64_t codebook,
                        int64_t out_features, ScalarType out_dtype, int64_t act) {
  return run_gemm(x, packed, suh, svh, bias, codebook, out_features, out_dtype,
                  static_cast<trellis::Act>(act), trellis::best_isa());
}

Tensor trellis_gemm_isa(Tensor x, Tensor packed, std::optional<Tensor> suh,
                        std::optional<Tensor> svh, std::optional<Tensor> bias, int64_t codebook,
                        int64_t out_features, ScalarType out_dtype, int64_t isa) {
  return run_gemm(x, packed, suh, svh, bias, codebook, out_features, out_dtype, trellis::kExact,
                  isa);
}

Tensor dequantize(Tensor packed, std::optional<Tensor> suh, std::optional<Tensor> svh,
                  int64_t codebook, ScalarType dtype) {
  trellis::checks::dequantize("dequantize", packed, suh, svh, codebook, dtype);
  std::vector<Tensor> kept;
  const trellis::Matrix w = matrix_of(packed, suh, svh, codebook, kept);
  Tensor out = torch::stable::new_empty(packed, {w.in_features(), w.out_features()}, dtype);
  trellis::dequantize(w, out.mutable_data_ptr(), dtype_of(dtype));
  return out;
}

Tensor hadamard_128(Tensor x) {
  trellis::checks::hadamard("hadamard_128", x);
  const Tensor rows = torch::stable::contiguous(x);
  Tensor out = torch::stable::new_empty(x, trellis::checks::sizes_of(x), x.scalar_type());
  trellis::hadamard_blocks(rows.const_data_ptr(), out.mutable_data_ptr(), dtype_of(x.scalar_type()),
                           x.numel() / 128);
  return out;
}

std::tuple<Tensor, Tensor> quantize_tiles_isa(Tensor tiles, int64_t tile_words, int64_t codebook,
                                              int64_t isa) {
  const char* op = "quantize_tiles";
  TRELLIS_CHECK(tiles.scalar_type() == ScalarType::Float, op, ": tiles has dtype ",
                trellis::checks::name_of(tiles.scalar_type()), ", expected float32");
  TRELLIS_CHECK(tiles.dim() == 2 && tiles.size(1) == 256, op, ": tiles has shape ",
                trellis::checks::shape_of(tiles), ", expected [T, 256]");
  trellis::checks::tile_words(op, "tiles", tile_words, codebook);
  check_isa(op, isa);

  const int words = static_cast<int>(tile_words);
  const int64_t count = tiles.size(0);
  const Tensor targets = torch::stable::contiguous(tiles);
  Tensor states = torch::stable::new_empty(tiles, {count, 256}, ScalarType::Int);
  Tensor values = torch::stable::new_empty(tiles, {count, 256}, ScalarType::Float);
  const float* table = trellis::codebook_values(static_cast<int>(codebook), words / 16);
  const trellis::SearchTile search = trellis::search_kernel(static_cast<trellis::Isa>(isa));

  // One scratch block per worker; each takes tiles worker, worker + workers, ...
  const int64_t workers = std::min<int64_t>(count, trellis::thread_count());
  const int64_t bytes = (static_cast<int64_t>(trellis::search_scratch_bytes(words)) + 63) / 64 * 64;
  Tensor scratch = torch::stable::new_empty(tiles, {workers * bytes + 64}, ScalarType::Byte);
  const auto base = (reinterpret_cast<uintptr_t>(scratch.mutable_data_ptr()) + 63) / 64 * 64;
  const float* target = static_cast<const float*>(targets.const_data_ptr());
  int32_t* state = static_cast<int32_t*>(states.mutable_data_ptr());
  float* value = static_cast<float*>(values.mutable_data_ptr());
  trellis::parallel_for(workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t worker = begin; worker < end; ++worker) {
      uint16_t path[256];
      for (int64_t t = worker; t < count; t += workers) {
        search(target + t * 256, table, words, reinterpret_cast<void*>(base + worker * bytes),
               path);
        for (int i = 0; i < 256; ++i) {
          state[t * 256 + i] = path[i];
          value[t * 256 + i] = table[path[i]];
        }
      }
    }
  });
  return {states, values};
}

std::tuple<Tensor, Tensor> quantize_tiles(Tensor tiles, int64_t tile_words, int64_t codebook) {
  return quantize_tiles_isa(tiles, tile_words, codebook, trellis::best_isa());
}

int64_t cpu_isas() { return trellis::available_isas(); }

int64_t cpu_gemm_isa(int64_t rows) { return trellis::gemm_isa(rows); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CPU, m) {
  m.impl("trellis_gemm", TORCH_BOX(&trellis_gemm));
  m.impl("trellis_gemm_inference", TORCH_BOX(&trellis_gemm));
  m.impl("trellis_gemm_act", TORCH_BOX(&trellis_gemm_act));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("hadamard_128", TORCH_BOX(&hadamard_128));
  m.impl("quantize_tiles", TORCH_BOX(&quantize_tiles));
  m.impl("_quantize_tiles_isa", TORCH_BOX(&quantize_tiles_isa));
  m.impl("_trellis_gemm_isa", TORCH_BOX(&trellis_gemm_isa));
}

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CompositeExplicitAutograd, m) {
  m.impl("_cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("_cpu_gemm_isa", TORCH_BOX(&cpu_gemm_isa));
}
