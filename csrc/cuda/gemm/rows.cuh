// Rows of activations and results: elements of any dtype, and the Hadamard transform of 128 of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../common/ptx.cuh"
#include "problem.h"

namespace trellis::cuda {

constexpr float kHadamardScale = 0.088388347648318447f;  // 1 / sqrt(128)

__device__ __forceinline__ float load_as_float(const void* p, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::Half:
      return __half2float(static_cast<const __half*>(p)[i]);
    case DType::BFloat16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]);
    default:
      return static_cast<const float*>(p)[i];
  }
}

__device__ __forceinline__ void store_as(void* p, DType dtype, int64_t i, float value) {
  switch (dtype) {
    case DType::Half:
      static_cast<__half*>(p)[i] = __float2half_rn(value);
      return;
    case DType::BFloat16:
      static_cast<__nv_bfloat16*>(p)[i] = __float2bfloat16_rn(value);
      return;
    default:
      static_cast<float*>(p)[i] = value;
  }
}

// Two neighbours, the first at an even index.
__device__ __forceinline__ void store_pair(void* p, DType dtype, int64_t i, float2 value) {
  switch (dtype) {
    case DType::Half:
      *reinterpret_cast<__half2*>(static_cast<__half*>(p) + i) = __float22half2_rn(value);
      return;
    case DType::BFloat16:
      *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(p) + i) =
          __float22bfloat162_rn(value);
      return;
    default:
      *reinterpret_cast<float2*>(static_cast<float*>(p) + i) = value;
  }
}

// A row of `size` elements of any dtype, four neighbours at a time.
struct Row {
  const char* p;
  DType dtype;
  int size;
  bool aligned;  // so that four elements are one load

  __device__ Row(const void* start, DType dtype_, int64_t row, int64_t size_)
      : p(static_cast<const char*>(start) + row * size_ * (dtype_ == DType::Float ? 4 : 2)),
        dtype(dtype_),
        size(static_cast<int>(size_)),
        aligned(reinterpret_cast<uintptr_t>(p) % (dtype_ == DType::Float ? 16 : 8) == 0) {}

  // Elements first .. first+3, first a multiple of four; zeros beyond the end.
  __device__ __forceinline__ void load(int first, float (&v)[4]) const {
    if (!aligned || first + 4 > size) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        v[j] = first + j < size ? load_as_float(p, dtype, first + j) : 0.0f;
      return;
    }
    if (dtype == DType::Float) {
      const float4 four = reinterpret_cast<const float4*>(p)[first / 4];
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
      return;
    }
    const uint2 four = reinterpret_cast<const uint2*>(p)[first / 4];
    float2 low, high;
    if (dtype == DType::Half) {
      low = __half22float2(reinterpret_cast<const __half2&>(four.x));
      high = __half22float2(reinterpret_cast<const __half2&>(four.y));
    } else {
      low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(four.x));
      high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(four.y));
    }
    v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
  }
};

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
// 4 l .. 4 l + 3 from `feature` on.
__device__ __forceinline__ void finish_row(const Gemm& g, float (&z)[4], int64_t row,
                                           int64_t feature, float row_scale) {
  const int lane = threadIdx.x % 32;
  feature += lane * 4;
  float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  if (g.svh != nullptr) {
    Row(g.svh, DType::Half, 0, g.out_tiles * 16).load(static_cast<int>(feature), scale);
    warp_hadamard(z, lane);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (feature + i >= g.out_columns) break;
    float value = z[i] * scale[i];
    if (g.svh != nullptr) value *= kHadamardScale;
    value *= row_scale;
    if (g.bias != nullptr) value += load_as_float(g.bias, g.bias_dtype, feature + i);
    store_as(g.y, g.y_dtype, row * g.out_columns + feature + i, value);
  }
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

}  // namespace trellis::cuda
