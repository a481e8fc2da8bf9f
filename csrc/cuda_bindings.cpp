// The CUDA kernels of torch.ops.trellis_ops on the LibTorch stable ABI.
#ifdef TRELLIS_CUDA

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "checks.h"
#include "cuda/gemm/problem.h"
#include "cuda/plain/plain.h"
#include "cuda_calls.h"
#include "dtypes.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using trellis::DType;
using trellis::dtype_of;
using trellis::cuda::aligned;
using trellis::cuda::attribute;
using trellis::cuda::check_launch;
using trellis::cuda::current_stream;
using trellis::cuda::Route;

// The exact and slow op, in Python, through the dispatcher.
Tensor parity_gemm(const Tensor& x, const Tensor& packed, const std::optional<Tensor>& suh,
                   const std::optional<Tensor>& svh, const std::optional<Tensor>& bias,
                   int64_t codebook, int64_t out_features, ScalarType out_dtype) {
  using torch::stable::detail::from;
  std::array<StableIValue, 8> stack{
      from(x),    from(packed),   from(suh),          from(svh),
      from(bias), from(codebook), from(out_features), from(out_dtype)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("trellis_ops::parity_gemm", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// The matrix and its vectors as kernels see them; `kept` holds the contiguous copies alive.
trellis::cuda::Gemm matrix_of(const Tensor& packed, const std::optional<Tensor>& suh,
                              const std::optional<Tensor>& svh, int64_t codebook,
                              std::vector<Tensor>& kept) {
  const auto keep = [&kept](Tensor t) {
    kept.push_back(std::move(t));
    return kept.back().const_data_ptr();
  };
  trellis::cuda::Gemm g = {};
  g.trellis = static_cast<const uint32_t*>(keep(aligned(packed)));
  g.in_tiles = packed.size(0);
  g.out_tiles = packed.size(1);
  g.tile_words = static_cast<int>(packed.size(2));
  g.codebook = static_cast<int>(codebook);
  g.suh = suh ? keep(torch::stable::contiguous(*suh)) : nullptr;
  g.svh = svh ? keep(torch::stable::contiguous(*svh)) : nullptr;
  return g;
}

Tensor trellis_gemm_route(Tensor x, Tensor packed, std::optional<Tensor> suh,
                          std::optional<Tensor> svh, std::optional<Tensor> bias, int64_t codebook,
                          int64_t out_features, ScalarType out_dtype, int64_t forced_route,
                          int64_t forced_share) {
  const char* op = "trellis_gemm";
  trellis::checks::gemm(op, x, packed, suh, svh, bias, codebook, out_features, out_dtype);
  // The sqg codebooks have no CUDA kernel yet, and none has a matrix without inputs or outputs.
  if (codebook > 2 || packed.numel() == 0)
    return parity_gemm(x, packed, suh, svh, bias, codebook, out_features, out_dtype);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int32_t device = x.get_device_index();

  std::vector<int64_t> shape = trellis::checks::sizes_of(x);
  shape.back() = out_features;
  Tensor y = torch::stable::new_empty(x, shape, out_dtype);
  const int64_t count = trellis::checks::rows_of(x);
  if (count == 0) return y;

  const Tensor rows = torch::stable::contiguous(x);
  const Tensor added = bias ? torch::stable::contiguous(*bias) : Tensor();
  std::vector<Tensor> kept;
  trellis::cuda::Gemm g = matrix_of(packed, suh, svh, codebook, kept);
  g.x = rows.const_data_ptr();
  g.x_dtype = dtype_of(x.scalar_type());
  g.m = count;
  g.in_columns = x.size(x.dim() - 1);
  g.bias = bias ? added.const_data_ptr() : nullptr;
  g.bias_dtype = bias ? dtype_of(bias->scalar_type()) : DType::Half;
  g.y = y.mutable_data_ptr();
  g.y_dtype = dtype_of(out_dtype);
  g.out_columns = out_features;

  const trellis::cuda::Gpu gpu = trellis::cuda::gpu_of(device);
  STD_TORCH_CHECK(forced_route >= 0 && forced_route <= static_cast<int>(Route::Last), op,
                  ": no such route: ", forced_route);
  const auto forced = static_cast<Route>(forced_route);
  STD_TORCH_CHECK(forced == Route::Automatic || trellis::cuda::can_run(forced, gpu), op,
                  ": this GPU cannot run route ", forced_route);
  const cudaStream_t stream = current_stream(device);
  const auto scratch_of = [&](int64_t bytes) {
    return torch::stable::new_empty(x, {bytes}, ScalarType::Byte);
  };
  const int64_t x_row = x.size(x.dim() - 1) * (g.x_dtype == DType::Float ? 4 : 2);
  const int64_t y_row = out_features * (g.y_dtype == DType::Float ? 4 : 2);
  for (int64_t row = 0; row < count; row += g.m) {
    g.m = count - row;
    g.x = static_cast<const char*>(rows.const_data_ptr()) + row * x_row;
    g.y = static_cast<char*>(y.mutable_data_ptr()) + row * y_row;
    const bool choose = forced == Route::Automatic;
    const Route route = choose ? trellis::cuda::choose_route(g, gpu) : forced;
    if (choose || route == Route::Small) g.m = trellis::cuda::rows_at_once(g, route, gpu);
    if (route == Route::Small) {
      const int64_t share =
          forced_share > 0 ? forced_share : trellis::cuda::small_share(g, gpu.sm_count);
      Tensor scratch = scratch_of(trellis::cuda::small_scratch_bytes(g, share));
      check_launch(op, trellis::cuda::launch_small(g, scratch.mutable_data_ptr(), share, stream));
    } else {
      const trellis::cuda::TileSchedule schedule =
          trellis::cuda::tile_schedule(g, route, gpu.sm_count, forced_share);
      Tensor scratch = scratch_of(trellis::cuda::tile_scratch_bytes(schedule));
      check_launch(op,
                   trellis::cuda::launch_tiles(g, schedule, scratch.mutable_data_ptr(), stream));
    }
  }
  return y;
}

Tensor trellis_gemm(Tensor x, Tensor packed, std::optional<Tensor> suh, std::optional<Tensor> svh,
                    std::optional<Tensor> bias, int64_t codebook, int64_t out_features,
                    ScalarType out_dtype) {
  return trellis_gemm_route(x, packed, suh, svh, bias, codebook, out_features, out_dtype, 0, 0);
}

Tensor dequantize(Tensor packed, std::optional<Tensor> suh, std::optional<Tensor> svh,
                  int64_t codebook, ScalarType dtype) {
  const char* op = "dequantize";
  trellis::checks::dequantize(op, packed, suh, svh, codebook, dtype);
  const torch::stable::accelerator::DeviceGuard guard(packed.get_device_index());
  Tensor out = torch::stable::new_empty(packed, {packed.size(0) * 16, packed.size(1) * 16}, dtype);
  if (out.numel() == 0) return out;
  std::vector<Tensor> kept;
  trellis::cuda::Gemm g = matrix_of(packed, suh, svh, codebook, kept);
  g.y = out.mutable_data_ptr();
  g.y_dtype = dtype_of(dtype);
  g.out_columns = packed.size(1) * 16;
  check_launch(op, trellis::cuda::launch_dequantize(g, current_stream(packed.get_device_index())));
  return out;
}

// How many rows are cut into tiles and these among workers, a number at a time: tests need no GPU for it.
int64_t tile_schedule(int64_t m, int64_t in_tiles, int64_t out_tiles, int64_t route,
                      int64_t sm_count, int64_t field) {
  trellis::cuda::Gemm g = {};
  g.m = m;
  g.in_tiles = in_tiles, g.out_tiles = out_tiles;
  const trellis::cuda::TileSchedule s =
      trellis::cuda::tile_schedule(g, static_cast<Route>(route), static_cast<int>(sm_count), 0);
  const std::array<int64_t, 9> fields = {s.row_tiles * s.columns,
                                         s.steps,
                                         s.slices,
                                         s.cluster,
                                         s.workers,
                                         s.rounds,
                                         s.rest,
                                         s.share,
                                         s.pitch};
  STD_TORCH_CHECK(field >= 0 && field < static_cast<int64_t>(fields.size()),
                  "_tile_schedule: no such field: ", field);
  return fields[field];
}

Tensor hadamard_128(Tensor x) {
  const char* op = "hadamard_128";
  trellis::checks::hadamard(op, x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tensor rows = torch::stable::contiguous(x);
  Tensor out = torch::stable::new_empty(rows, trellis::checks::sizes_of(x), x.scalar_type());
  check_launch(op, trellis::cuda::launch_hadamard(rows.const_data_ptr(), out.mutable_data_ptr(),
                                                  dtype_of(x.scalar_type()), x.numel() / 128,
                                                  current_stream(x.get_device_index())));
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CUDA, m) {
  m.impl("trellis_gemm", TORCH_BOX(&trellis_gemm));
  m.impl("_trellis_gemm_route", TORCH_BOX(&trellis_gemm_route));
  m.impl("trellis_gemm_inference", TORCH_BOX(&trellis_gemm));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("hadamard_128", TORCH_BOX(&hadamard_128));
}

STABLE_TORCH_LIBRARY_IMPL(trellis_ops, CompositeExplicitAutograd, m) {
  m.impl("_tile_schedule", TORCH_BOX(&tile_schedule));
}

#endif  // TRELLIS_CUDA
