// Rows of activations and results: elements of any dtype, and the Hadamard transform of 128 of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "../common/ptx.cuh"
#include "problem.h"

namespace trellis::cuda {

constexpr float kHadamardScale = 0.088388347648318447f;  // 1 / sqrt(128)

__device__ __forceinline__ float to_float(__half value) { return __half2float(value); }
__device__ __forceinline__ float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ __forceinline__ float to_float(float value) { return value; }
__device__ __forceinline__ void from_float(float value, __half& to) { to = __float2half_rn(value); }
__device__ __forceinline__ void from_float(float value, __nv_bfloat16& to) {
  to = __float2bfloat16_rn(value);
}
__device__ __forceinline__ void from_float(float value, float& to) { to = value; }

// Calls f with the pointer as one to its elements.
template <typename Void, typename F>
__device__ __forceinline__ void with_dtype(DType dtype, Void* p, F f) {
  const auto as = [p](auto element) {
    using Element = decltype(element);
    if constexpr (std::is_const_v<Void>)
      return static_cast<const Element*>(p);
    else
      return static_cast<Element*>(p);
  };
  switch (dtype) {
    case DType::Half:
      return f(as(__half{}));
    case DType::BFloat16:
      return f(as(__nv_bfloat16{}));
    default:
      return f(as(0.0f));
  }
}

__device__ __forceinline__ float load_as_float(const void* p, DType dtype, int64_t i) {
  float value;
  with_dtype(dtype, p, [&](const auto* elements) { value = to_float(elements[i]); });
  return value;
}

__device__ __forceinline__ void store_as(void* p, DType dtype, int64_t i, float value) {
  with_dtype(dtype, p, [&](auto* elements) { from_float(value, elements[i]); });
}

// Sixteen neighbours, by wide loads if the first is at a multiple of 16 bytes.
template <typename Element>
__device__ __forceinline__ void load_sixteen(const Element* p, bool wide, float (&v)[16]) {
  if (wide) {
    constexpr int kOf16Bytes = 16 / sizeof(Element);
#pragma unroll
    for (int i = 0; i < 16 / kOf16Bytes; ++i) {
      const uint4 raw = reinterpret_cast<const uint4*>(p)[i];
      const Element* const elements = reinterpret_cast<const Element*>(&raw);
#pragma unroll
      for (int j = 0; j < kOf16Bytes; ++j) v[i * kOf16Bytes + j] = to_float(elements[j]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; ++i) v[i] = to_float(p[i]);
}

// Eight neighbours, the first at a multiple of 16 bytes.
__device__ __forceinline__ void store_eight(void* p, DType dtype, int64_t i, const float (&v)[8]) {
  if (dtype == DType::Float) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(p) + i);
    to[0] = float4{v[0], v[1], v[2], v[3]}, to[1] = float4{v[4], v[5], v[6], v[7]};
    return;
  }
  uint32_t pairs[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // Both, and one is taken: shorter than a branch.
    const float2 two{v[2 * j], v[2 * j + 1]};
    const __half2 half = __float22half2_rn(two);
    const __nv_bfloat162 bfloat = __float22bfloat162_rn(two);
    pairs[j] = dtype == DType::Half ? reinterpret_cast<const uint32_t&>(half)
                                    : reinterpret_cast<const uint32_t&>(bfloat);
  }
  *reinterpret_cast<uint4*>(static_cast<__half*>(p) + i) =
      uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
}

// Four neighbours by one load.
template <DType kDType>
__device__ __forceinline__ void load_four(const char* p, float (&v)[4]) {
  if constexpr (kDType == DType::Float) {
    const float4 four = *reinterpret_cast<const float4*>(p);
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
  } else {
    const uint2 four = *reinterpret_cast<const uint2*>(p);
    float2 low, high;
    if constexpr (kDType == DType::Half) {
      low = __half22float2(reinterpret_cast<const __half2&>(four.x));
      high = __half22float2(reinterpret_cast<const __half2&>(four.y));
    } else {
      low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(four.x));
      high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(four.y));
    }
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// Where the sum of a row (of eight) and a feature (of 128) lies: as MMA results fall, tile, lane, register.
__device__ __forceinline__ int sum_index(int row, int feature) {
  const int lane = feature % 8 * 4 + row / 2;
  return feature / 16 * 128 + lane * 4 + feature / 8 % 2 * 2 + row % 2;
}

__device__ __forceinline__ float4 add(float4 a, float4 b) {
  return float4{a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __int_as_float((exponent + 127) << 23);
}

// A warp's 128 values, four neighbours a lane: unnormalised Hadamard transform in natural order.
__device__ __forceinline__ void warp_hadamard(float (&v)[4], int lane) {
  const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];
  v[0] = a + c, v[1] = b + d, v[2] = a - c, v[3] = b - d;
#pragma unroll
  for (int stride = 1; stride < 32; stride *= 2) {
    const float sign = lane & stride ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = fmaf(sign, v[i], __shfl_xor_sync(0xFFFFFFFFu, v[i], stride));
  }
}

// The last step of 128 sums of a row, one warp: transform, scales, bias, rounding. Lane l has features
// 4 l .. 4 l + 3 from `feature` on. Short code rather than wide accesses: a decode step fetches these
// instructions from memory, since the weights have pushed them out of the cache.
__device__ __forceinline__ void finish_row(const Gemm& g, float (&z)[4], int64_t row,
                                           int64_t feature, float row_scale) {
  const int lane = threadIdx.x % 32;
  feature += lane * 4;
  if (g.svh != nullptr) {
    float scale[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      scale[i] = __half2float(static_cast<const __half*>(g.svh)[feature + i]);
    warp_hadamard(z, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = z[i] * scale[i] * kHadamardScale;
  }
  const int count = static_cast<int>(min(static_cast<int64_t>(4), g.out_columns - feature));
#pragma unroll
  for (float& value : z) value *= row_scale;
  if (g.bias != nullptr) {
    with_dtype(g.bias_dtype, g.bias, [&](const auto* bias) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i < count) z[i] += to_float(bias[feature + i]);
    });
  }
  with_dtype(g.y_dtype, g.y, [&](auto* y) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) from_float(z[i], y[row * g.out_columns + feature + i]);
  });
}

// A thread's kCount values, a power of two of them: the same transform.
template <int kCount>
__device__ __forceinline__ void thread_hadamard(float (&v)[kCount]) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (i & stride) continue;
      const float a = v[i], b = v[i + stride];
      v[i] = a + b, v[i + stride] = a - b;
    }
  }
}

// A warp's 512 values, 16 neighbours a lane: the same transform of each 128.
__device__ __forceinline__ void lanes_hadamard(float (&v)[16], int lane) {
  thread_hadamard(v);
#pragma unroll
  for (int stride = 1; stride < 8; stride *= 2) {
    const float sign = lane & stride ? -1.0f : 1.0f;
#pragma unroll
    for (float& value : v) value = fmaf(sign, value, __shfl_xor_sync(0xFFFFFFFFu, value, stride));
  }
}

}  // namespace trellis::cuda
