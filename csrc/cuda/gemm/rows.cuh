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

// Two neighbours that share a word.
__device__ __forceinline__ float2 pair_of(uint32_t word, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}
__device__ __forceinline__ float2 pair_of(uint32_t word, __nv_bfloat16) {
  return float2{__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000u)};
}

// Neighbours, zeros if they are not there: by wide loads, if the first lies at a multiple of the bytes that they all
// take, or of 16.
template <typename Element, int kCount>
__device__ __forceinline__ void load_neighbours(const Element* p, bool wide, bool there,
                                                float (&v)[kCount]) {
  constexpr int kWords = kCount * sizeof(Element) / 4;
  using Piece = std::conditional_t<kWords % 4 == 0, uint4, uint2>;
  if (wide) {
    Piece pieces[kWords * 4 / sizeof(Piece)] = {};
    if (there) {
#pragma unroll
      for (int i = 0; i < kWords * 4 / sizeof(Piece); ++i)
        pieces[i] = reinterpret_cast<const Piece*>(p)[i];
    }
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(pieces);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(Element) == 4) {
        v[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = pair_of(words[i], Element{});
        v[2 * i] = pair.x, v[2 * i + 1] = pair.y;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) v[i] = there ? to_float(p[i]) : 0.0f;
}

// Four or eight neighbours, the first at a multiple of the bytes that they all take, or of 16.
template <int kCount>
__device__ __forceinline__ void store_neighbours(void* p, DType dtype, int64_t i,
                                                 const float (&v)[kCount]) {
  if (dtype == DType::Float) {
    float4* const to = reinterpret_cast<float4*>(static_cast<float*>(p) + i);
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j)
      to[j] = float4{v[4 * j], v[4 * j + 1], v[4 * j + 2], v[4 * j + 3]};
    return;
  }
  uint32_t pairs[kCount / 2];
#pragma unroll
  for (int j = 0; j < kCount / 2; ++j) {
    // Both, and one is taken: shorter than a branch.
    const float2 two{v[2 * j], v[2 * j + 1]};
    const __half2 half = __float22half2_rn(two);
    const __nv_bfloat162 bfloat = __float22bfloat162_rn(two);
    pairs[j] = dtype == DType::Half ? reinterpret_cast<const uint32_t&>(half)
                                    : reinterpret_cast<const uint32_t&>(bfloat);
  }
  __half* const to = static_cast<__half*>(p) + i;
  if constexpr (kCount == 8)
    *reinterpret_cast<uint4*>(to) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
  else
    *reinterpret_cast<uint2*>(to) = uint2{pairs[0], pairs[1]};
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

__device__ __forceinline__ void butterfly(float& a, float& b) {
  const float sum = a + b, difference = a - b;
  a = sum, b = difference;
}

// A thread's kCount values, a power of two of them: the same transform.
template <int kCount>
__device__ __forceinline__ void thread_hadamard(float (&v)[kCount]) {
#pragma unroll
  for (int stride = 1; stride < kCount; stride *= 2) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if ((i & stride) == 0) butterfly(v[i], v[i + stride]);
    }
  }
}

}  // namespace trellis::cuda
