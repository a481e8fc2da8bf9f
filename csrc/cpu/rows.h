// What happens to a row before and after the product. Every file of kernels has a copy in its own
// instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#ifdef __AVX512F__
#include "avx512.h"
#elif defined(__F16C__)
#include <immintrin.h>
#endif

#include "hadamard.h"
#include "layer.h"

namespace trellis {
namespace {

// out[0..count) from data[first..); count is at most kHadamard.
inline void widen(const void* data, int64_t first, int count, DType dtype, float* out) {
  switch (dtype) {
    case DType::Half: {
      const uint16_t* from = static_cast<const uint16_t*>(data) + first;
      int i = 0;
#ifdef __AVX512F__
      for (; i + 16 <= count; i += 16)
        _mm512_storeu_ps(
            out + i,
            _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i))));
#endif
#ifdef __F16C__
      for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(
            out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
#endif
      for (; i < count; ++i) out[i] = float_from_half(from[i]);
      return;
    }
    case DType::BFloat16: {
      const uint16_t* from = static_cast<const uint16_t*>(data) + first;
      for (int i = 0; i < count; ++i) out[i] = float_from_bfloat16(from[i]);
      return;
    }
    default:
      std::memcpy(out, static_cast<const float*>(data) + first, sizeof(float) * count);
  }
}

inline void narrow(const float* values, int count, DType dtype, void* data, int64_t first) {
  switch (dtype) {
    case DType::Half: {
      uint16_t* to = static_cast<uint16_t*>(data) + first;
      int i = 0;
#ifdef __F16C__
      for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(values + i), _MM_FROUND_TO_NEAREST_INT));
#endif
      for (; i < count; ++i) to[i] = half_from_float(values[i]);
      return;
    }
    case DType::BFloat16: {
      uint16_t* to = static_cast<uint16_t*>(data) + first;
      int i = 0;
#ifdef __AVX512F__
      for (; i + 16 <= count; i += 16) {
        const __m512 value = _mm512_loadu_ps(values + i);
        const __m512i bits = _mm512_castps_si512(value), upper = _mm512_srli_epi32(bits, 16);
        const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi32(1));
        const __m512i half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF));
        const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, half), 16);
        const __m512i quiet = _mm512_or_si512(upper, _mm512_set1_epi32(0x40));
        const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i),
                            _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet)));
      }
#endif
      for (; i < count; ++i) to[i] = bfloat16_from_float(values[i]);
      return;
    }
    default:
      std::memcpy(static_cast<float*>(data) + first, values, sizeof(float) * count);
  }
}

// Power of two that brings the largest element of a row into [1, 2), so that neither the Hadamard
// sums nor the product overflow float32 whatever the activations are. Its inverse is exact too.
inline float row_scale(const Rows& x, int64_t row) {
  uint32_t most = 0;  // magnitudes compare as their bits do
  float values[kHadamard];
  for (int64_t first = 0; first < x.columns; first += kHadamard) {
    const int count = static_cast<int>(std::min<int64_t>(kHadamard, x.columns - first));
    widen(x.data, row * x.columns + first, count, x.dtype, values);
    for (int i = 0; i < count; ++i) most = std::max(most, bits_from_float(values[i]) & 0x7FFFFFFFu);
  }
  const float largest = float_from_bits(most);
  if (!(largest > 0.0f) || !std::isfinite(largest)) return 1.0f;
  return std::ldexp(1.0f, std::clamp(std::ilogb(largest), -100, 126));
}

// The next three are SlabKernels' own.
inline void rotate(const Matrix& w, const Rows& x, int64_t row, float* out, float* scale) {
  *scale = row_scale(x, row);
  const float inverse = 1.0f / *scale;
  float factors[kHadamard];
  for (int64_t first = 0; first < w.in_features(); first += kHadamard) {
    const int size = static_cast<int>(std::min<int64_t>(kHadamard, w.in_features() - first));
    const int count = static_cast<int>(std::clamp<int64_t>(x.columns - first, 0, size));
    float* const block = out + first;
    widen(x.data, row * x.columns + first, count, x.dtype, block);
    for (int i = count; i < size; ++i) block[i] = 0.0f;
    for (int i = 0; i < size; ++i) block[i] *= inverse;
    if (w.suh == nullptr) continue;
    widen(w.suh, first, size, DType::Half, factors);
    for (int i = 0; i < size; ++i) block[i] *= factors[i];
    hadamard_128(block);
    for (int i = 0; i < size; ++i) block[i] *= static_cast<float>(kInvSqrt128);
  }
}

inline void finish(const Matrix& w, int64_t first_column, int columns, float scale, float* values) {
  float factors[kSlabColumns];
  if (w.svh != nullptr) {
    hadamard_128(values);
    widen(w.svh, first_column, columns, DType::Half, factors);
    for (int i = 0; i < columns; ++i) values[i] *= static_cast<float>(kInvSqrt128) * factors[i];
  }
  for (int i = 0; i < columns; ++i) values[i] *= scale;
}

inline void write(const Output& out, int64_t row, int64_t first_column, int columns,
                  float* values) {
  float added[kSlabColumns];
  if (out.bias != nullptr) {
    widen(out.bias, first_column, columns, out.bias_dtype, added);
    for (int i = 0; i < columns; ++i) values[i] += added[i];
  }
  narrow(values, columns, out.dtype, out.data, row * out.columns + first_column);
}

}  // namespace
}  // namespace trellis
