// One expert's vectors and the activation, and how values become what the products take.
#pragma once

#include "../gemm/rows.cuh"
#include "plan.h"

namespace trellis::cuda {

// Words of a tile, by the table; 0: the matrix is not here.
__device__ __forceinline__ int64_t tile_words_of(const Moe& m, int which, int64_t expert,
                                                 int64_t slice) {
  return m.table[((which * m.experts + expert) * m.slices + slice) * 2 + 1];
}

// The id that a route names, whatever it is.
__device__ __forceinline__ int64_t expert_of_route(const Moe& m, int64_t route) {
  return m.wide_ids ? static_cast<const int64_t*>(m.ids)[route]
                    : static_cast<const int32_t*>(m.ids)[route];
}

// -1: no such expert here.
__device__ __forceinline__ int expert_of(const Moe& m, int64_t route) {
  const int64_t id = expert_of_route(m, route);
  if (id < 0 || id >= m.experts) return -1;
  for (int64_t slice = 0; slice < m.slices; ++slice)
    if (tile_words_of(m, 2, id, slice) == 0) return -1;
  return static_cast<int>(id);
}

// Divided as 32 bits, which the numbers of matrices fit, and only where experts share vectors: 64 are a hundred
// instructions more, from cold memory.
__device__ __forceinline__ const __half* vector_of(const Stack& stack, int64_t matrix) {
  const uint32_t rows = static_cast<uint32_t>(stack.rows);
  uint32_t row = static_cast<uint32_t>(matrix);
  if (row >= rows) row %= rows;
  return static_cast<const __half*>(stack.data) + row * stack.columns;
}

// Products are rounded (__fmul_rn) wherever a sum follows: fused with it in one kernel and not in another they would be
// other bits, and a row's must not depend on which kernels it goes through.

// A warp's 128 sums, four neighbours a lane, become results of the layer: transform, scale.
__device__ __forceinline__ void finish_linear(const Projection& p, int64_t matrix, int feature,
                                              float (&z)[4]) {
  const __half* const svh = vector_of(p.svh, matrix) + feature;
  float scale[4];  // before the transform, which the memory answers meanwhile
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = __half2float(svh[i]);
  // Scaled first: the transform adds up 128 of them.
#pragma unroll
  for (float& value : z) value = __fmul_rn(value, kHadamardScale);
  warp_hadamard(z, threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < 4; ++i) z[i] = __fmul_rn(z[i], scale[i]);
}

template <int kCount>
__device__ __forceinline__ void add_bias(const Stack& bias, int64_t row, int feature,
                                         float (&z)[kCount]) {
  if (bias.data == nullptr) return;
  with_dtype(bias.dtype, bias.data, [&](const auto* values) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) z[i] += to_float(values[row * bias.columns + feature + i]);
  });
}

// As ../../cpu/moe.cpp has it; comparisons are such that a NaN stays one. u becomes the result. The activation
// is chosen outside the loops, so that a launch fetches the instructions of its own only.
__device__ __forceinline__ void activate(const Moe& m, const float (&gate)[4], float (&u)[4]) {
  const auto each = [&](auto f) {
#pragma unroll
    for (int i = 0; i < 4; ++i) f(gate[i], u[i]);
  };
  // Right to six digits, in a fifth of the instructions; a denominator that overflows makes it zero.
  const auto sigmoid_times = [](float g, float factor) {
    return __fdividef(g, 1.0f + __expf(-factor * g));
  };
  if (m.activation == kRelu2) {
    return each([](float, float& u) {
      const float positive = u < 0.0f ? 0.0f : u;
      u = positive * positive;
    });
  }
  const float infinity = __int_as_float(0x7F800000);
  const float limit = m.limit > 0.0f ? m.limit : infinity;
  const float before = m.limit_after ? infinity : limit, after = m.limit_after ? limit : infinity;
  const auto gated = [&](auto activation) {
    each([&](float g, float& u) {
      g = g > before ? before : g;
      u = u > limit ? limit : u < -limit ? -limit : u;
      const float value = activation(g);
      u = (value > after ? after : value) * u;
    });
  };
  switch (m.activation) {
    case kSwigluOai:
      return each([&](float g, float& u) {
        g = g > before ? before : g;
        u = u > limit ? limit : u < -limit ? -limit : u;
        u = (u + 1.0f) * sigmoid_times(g, 1.702f);
      });
    case kGelu:
      return gated([](float g) { return 0.5f * g * erfcf(g * -0.70710678f); });
    case kGeluTanh:
      return gated([](float g) {
        return 0.5f * g * (1.0f + tanhf(0.79788456f * (g + 0.044715f * g * g * g)));
      });
    default:
      return gated([&](float g) { return sigmoid_times(g, 1.0f); });
  }
}

// A warp's 128 sums of up and of gate, four from `feature` on in this lane, become what goes into down, in u.
__device__ __forceinline__ void finish_inner(const Moe& m, int64_t matrix, int feature,
                                             float (&g)[4], float (&u)[4]) {
  finish_linear(m.up, matrix, feature, u);
  add_bias(m.up.bias, matrix, feature, u);
  if (m.gate.suh.data != nullptr) {
    finish_linear(m.gate, matrix, feature, g);
    add_bias(m.gate.bias, matrix, feature, g);
  }
  activate(m, g, u);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (feature + i >= m.intermediate) u[i] = 0.0f;
}

// Of a power of two near a magnitude: the largest there is where that overflows, the smallest for zero (others
// are measured by the largest of their row).
__device__ __forceinline__ int exponent_of(float most) {
  return max(-126, min(126, (__float_as_int(most) >> 23) - 127));
}

// Two FP16 numbers in a register.
__device__ __forceinline__ uint32_t times(uint32_t pair, __half2 factor) {
  const __half2 product = __hmul2(reinterpret_cast<const __half2&>(pair), factor);
  return reinterpret_cast<const uint32_t&>(product);
}

// Four neighbours of a vector, each a lane's of 128-block `block`.
__device__ __forceinline__ void load_scales(const __half* vector, int block, float (&scale)[4]) {
  const __half* const at = vector + block * 128 + threadIdx.x % 32 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) scale[i] = __half2float(at[i]);
}

// H(v * scale) of a warp's 128 values, in v; returns the power of two that they are to be multiplied by.
__device__ __forceinline__ float rotate_scaled(float (&v)[4], const float (&scale)[4]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) most = fmaxf(most, fabsf(v[i] * scale[i]));
  const int exponent = exponent_of(warp_max(most));
  const float inverse = power_of_two(-exponent);
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = __fmul_rn(__fmul_rn(v[i], inverse), scale[i]);
  warp_hadamard(v, threadIdx.x % 32);
#pragma unroll
  for (float& value : v) value = __fmul_rn(value, kHadamardScale);
  return power_of_two(exponent);
}

// Writes a lane's four neighbours into a k tile's fragments of a row, which begin at `row`: inputs k, k+1 and
// k+2, k+3 are two lanes' pairs. `terms`: one FP16 number for a value, or a second for what the first leaves,
// which is `step` pairs further on.
__device__ __forceinline__ void write_terms(float (&z)[4], __half2* row, int64_t step, int terms) {
  const int lane = threadIdx.x % 32;
  row += lane % 2 * 4 + lane % 4 / 2;
  for (int term = 0; term < terms; ++term, row += step) {
    const __half2 first = __floats2half2_rn(z[0], z[1]), second = __floats2half2_rn(z[2], z[3]);
    row[0] = first;
    row[2] = second;
    z[0] -= __low2float(first), z[1] -= __high2float(first);
    z[2] -= __low2float(second), z[3] -= __high2float(second);
  }
}

// H(v * scale) of a warp's 128 values as fragments of row `row` of a row block, k tiles from 8 * block on,
// with a power of two as the block's scale.
__device__ __forceinline__ void write_fragments(float (&v)[4], const float (&scale)[4],
                                                uint32_t* fragments, float* scales, int block,
                                                int row, int row_groups, int terms) {
  const int lane = threadIdx.x % 32;
  const float scale_of_block = rotate_scaled(v, scale);
  __half2* const at =
      reinterpret_cast<__half2*>(fragments) +
      (static_cast<int64_t>(block * 8 + lane / 4) * terms * row_groups + row / 8) * 64 +
      row % 8 * 8;
  write_terms(v, at, row_groups * 64, terms);
  if (lane == 0) scales[block * row_groups * 8 + row] = scale_of_block;
}

// Four neighbours of a token's x, zero beyond its end.
__device__ __forceinline__ void load_x(const Moe& m, int64_t token, int feature, float (&v)[4]) {
  with_dtype(m.x_dtype, m.x, [&](const auto* x) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = feature + i < m.columns ? to_float(x[token * m.columns + feature + i]) : 0.0f;
  });
}

// Four neighbours of a token's y, whose routes are added up.
__device__ __forceinline__ void write_y(const Moe& m, int64_t token, int feature,
                                        const float (&sums)[4]) {
  const int64_t first = token * m.columns + feature;
  const int size = m.y_dtype == DType::Float ? 4 : 2;
  float y[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) y[i] = sums[i] * m.routed_scale;
  if (feature + 4 <= m.columns &&
      (reinterpret_cast<uintptr_t>(m.y) + first * size) % (4 * size) == 0)
    return store_neighbours(m.y, m.y_dtype, first, y);
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (feature + i < m.columns) store_as(m.y, m.y_dtype, first + i, y[i]);
}

// Four neighbours of a token's y: weights, biases and sums in the order of slots and slices.
__device__ __forceinline__ void add_up(const Moe& m, const MoeScratch& s, int64_t token,
                                       int feature) {
  float sums[4] = {};
  for (int64_t k = 0; k < m.top_k; ++k) {
    const int64_t route = token * m.top_k + k;
    const int slot = s.slot[route];
    if (slot < 0) continue;
    float value[4] = {};
    for (int64_t slice = 0; slice < m.slices; ++slice) {
      const float4 part = __ldcg(reinterpret_cast<const float4*>(
          s.results + (slot * m.slices + slice) * m.hidden + feature));
      value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
    }
    add_bias(m.down.bias, s.expert[slot / (s.row_groups * 8)], feature, value);
    const float weight = load_as_float(m.weights, m.weights_dtype, route);
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[i] = fmaf(weight, value[i], sums[i]);
  }
  write_y(m, token, feature, sums);
}

}  // namespace trellis::cuda
