// What lies between the products of few routes: their rows, and y. The host side of all.
#include "../gemm/launch.cuh"
#include "few_routes.cuh"

namespace trellis::cuda {
namespace {

// Rows that a pass must be able to serve, in those of an average expert.
constexpr int kFewMargin = 3;
constexpr int kFewWarps = 8;  // of a block

// A warp a 128-block of a route's row, for a slice and a rotation. Rows of gate and up are x; those of down are what
// comes of the sums of gate and up.
template <bool kDown>
__global__ void __launch_bounds__(kFewWarps * 32)
    rotate_few_routes(const Moe m, const FewScratch scratch, const int terms) {
  const int lane = threadIdx.x % 32, slices = static_cast<int>(m.slices);
  const int blocks = static_cast<int>((kDown ? m.inner : m.hidden) / 128);
  const int rotations = kDown || one_rotation(m) ? 1 : 2;
  const int at = static_cast<int>(blockIdx.x) * kFewWarps + static_cast<int>(threadIdx.x) / 32;
  const int place = at / blocks, block = at - place * blocks;
  const int sliced = place / rotations, rotation = place - sliced * rotations;
  const int route = sliced / slices, slice = sliced - route * slices;
  if constexpr (kDown)
    let_next_kernel_start();
  else
    begin_after_previous_kernel();
  const bool there = route < m.tokens * m.top_k;
  const int64_t id = there ? expert_of_route(m, route) : -1;
  const bool within = id >= 0 && id < m.experts;
  const int64_t matrix = within ? id * slices + slice : 0;
  const int feature = block * 128 + lane * 4;
  if (kDown && within) {
    prefetch(vector_of(m.up.svh, matrix) + feature);
    prefetch(vector_of(m.down.suh, matrix) + feature);
    if (m.gate.suh.data != nullptr) prefetch(vector_of(m.gate.svh, matrix) + feature);
  }
  if constexpr (kDown) wait_for_previous_kernel();
  if (!within) return;
  float v[4], suh[4];
  if constexpr (kDown) {
    const int passes = m.gate.suh.data != nullptr ? 2 : 1;
    const float4* const sums = reinterpret_cast<const float4*>(
        scratch.sums + static_cast<int64_t>(sliced) * passes * m.inner + feature);
    const float4 up = __ldcg(sums + (passes - 1) * m.inner / 4);
    float4 gate = {};
    if (passes == 2) gate = __ldcg(sums);
    load_scales(vector_of(m.down.suh, matrix), block, suh);
    v[0] = up.x, v[1] = up.y, v[2] = up.z, v[3] = up.w;
    float g[4] = {gate.x, gate.y, gate.z, gate.w};
    finish_inner(m, matrix, feature, g, v);
  } else {
    load_x(m, route / static_cast<int>(m.top_k), feature, v);
    load_scales(vector_of((rotations == 2 && rotation == 0 ? m.gate : m.up).suh, matrix), block,
                suh);
  }
  const float scale = rotate_scaled(v, suh);
  __half2* const row = reinterpret_cast<__half2*>(
      scratch.rows[kDown] + static_cast<int64_t>(place) * blocks * 16 * terms);
  write_terms(v, row + (block * 8 + lane / 4) * 8, blocks * 8 * 8, terms);
  if (lane == 0) scratch.scales[kDown][place * blocks + block] = scale;
}

// A block 128 features of a token; a warp a route of it. Weights, biases and sums in the order of slots and slices,
// as add_up has them.
__global__ void __launch_bounds__(kFewWarps * 32)
    add_few_routes(const Moe m, const FewScratch scratch) {
  __shared__ float4 values[kFewWarps][32];
  __shared__ float weights[kFewWarps];
  __shared__ bool counts[kFewWarps];
  let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = blockIdx.y;
  const int feature = static_cast<int>(blockIdx.x) * 128 + lane * 4;
  float sums[4] = {};
  for (int64_t first = 0; first < m.top_k; first += kFewWarps) {
    const int64_t k = first + warp, route = token * m.top_k + k;
    const int expert = k < m.top_k ? expert_of(m, route) : -1;
    float weight = 0.0f;
    if (expert >= 0) {
      weight = load_as_float(m.weights, m.weights_dtype, route);
      for (int64_t slice = 0; slice < m.slices; ++slice)
        prefetch(vector_of(m.down.svh, expert * m.slices + slice) + feature);
    }
    if (first == 0) wait_for_previous_kernel();
    if (expert >= 0) {
      float value[4] = {};
      for (int64_t slice = 0; slice < m.slices; ++slice) {
        const float4 raw = __ldcg(reinterpret_cast<const float4*>(
            scratch.results + (route * m.slices + slice) * m.hidden + feature));
        float part[4] = {raw.x, raw.y, raw.z, raw.w};
        finish_linear(m.down, expert * m.slices + slice, feature, part);
#pragma unroll
        for (int i = 0; i < 4; ++i) value[i] += part[i];
      }
      add_bias(m.down.bias, expert, feature, value);
      values[warp][lane] = float4{value[0], value[1], value[2], value[3]};
    }
    if (lane == 0) weights[warp] = weight, counts[warp] = expert >= 0;
    __syncthreads();
    if (warp == 0) {
      for (int i = 0; i < kFewWarps; ++i) {
        if (first + i >= m.top_k || !counts[i]) continue;
        const float4 value = values[i][lane];
        sums[0] = fmaf(weights[i], value.x, sums[0]), sums[1] = fmaf(weights[i], value.y, sums[1]);
        sums[2] = fmaf(weights[i], value.z, sums[2]), sums[3] = fmaf(weights[i], value.w, sums[3]);
      }
    }
    __syncthreads();
  }
  if (warp == 0) write_y(m, token, feature, sums);
}

}  // namespace

FewPlan plan_few_routes(const Moe& m, bool exact) {
  FewPlan plan = {};
  if (m.tokens * m.top_k > kFewRoutes) return plan;
  // Of an input of a row; of a row whatever its inputs.
  const int64_t input_bytes = exact ? 4 : 2;
  const int64_t row_bytes = kExpertWarps * kFewPartFeatures * sizeof(float);
  const auto rows_of = [&](int64_t room, int64_t inputs) {
    const int64_t scales = inputs / 128 * 8 * sizeof(float);
    return static_cast<int>(std::clamp<int64_t>(
        (room - kFewFixedBytes - scales) / (inputs * input_bytes + row_bytes), 0, 8));
  };
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  const int most = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  for (plan.blocks_of_sm = 2; plan.blocks_of_sm >= 1; --plan.blocks_of_sm) {
    const int room =
        std::min(most, attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / plan.blocks_of_sm -
                           reserved) /
        128 * 128;
    plan.rows = std::min(rows_of(room, m.hidden), rows_of(room, m.inner));
    plan.shared_bytes = room;
    if (plan.rows > 0) break;
  }
  // Experts with more rows than that are decoded more than once. A token's own are different ones.
  plan.is_best =
      plan.rows > 0 && (m.tokens == 1 || plan.rows * m.experts >= kFewMargin * m.tokens * m.top_k);
  return plan;
}

cudaError_t launch_few_routes(bool exact, const Moe& m, const FewScratch& scratch,
                              const FewPlan& plan, cudaStream_t stream) {
  const auto rotate = [&](auto kernel, int64_t rows, int64_t inputs) {
    const int64_t warps = m.tokens * m.top_k * m.slices * rows * (inputs / 128);
    const cudaError_t error = prefer_shared(kernel);
    if (error != cudaSuccess) return error;
    return launch_overlapping(kernel, (warps + kFewWarps - 1) / kFewWarps, kFewWarps * 32, 0, 1,
                              stream, m, scratch, exact ? 2 : 1);
  };
  const auto multiply = [&](bool down) {
    return exact ? launch_few_products<true>(down, m, scratch, plan, stream)
                 : launch_few_products<false>(down, m, scratch, plan, stream);
  };
  cudaError_t error = rotate(rotate_few_routes<false>, one_rotation(m) ? 1 : 2, m.hidden);
  if (error == cudaSuccess) error = multiply(false);
  if (error == cudaSuccess) error = rotate(rotate_few_routes<true>, 1, m.inner);
  if (error == cudaSuccess) error = multiply(true);
  if (error == cudaSuccess) error = prefer_shared(add_few_routes);
  if (error != cudaSuccess) return error;
  const dim3 blocks(static_cast<unsigned>(m.hidden / 128), static_cast<unsigned>(m.tokens));
  return launch_overlapping_grid(add_few_routes, blocks, kFewWarps * 32, 0, 1, stream, m, scratch);
}

}  // namespace trellis::cuda
