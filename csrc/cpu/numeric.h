// 16-bit floats as bit patterns, converted with round to nearest even, on any compiler and device.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#define TRELLIS_ANYWHERE __host__ __device__
#else
#define TRELLIS_ANYWHERE
#endif

namespace trellis {

// The activation dtypes, as the bindings pass them to kernels.
enum class DType { Half, BFloat16, Float };

TRELLIS_ANYWHERE inline float float_from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TRELLIS_ANYWHERE inline uint32_t bits_from_float(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

TRELLIS_ANYWHERE inline float float_from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7FFFu;
  if (magnitude >= 0x7C00u) return float_from_bits(sign | 0x7F800000u | (magnitude & 0x3FFu) << 13);
  if (magnitude >= 0x400u) return float_from_bits(sign | ((magnitude << 13) + 0x38000000u));
  // Subnormal: through an integer, as a subnormal float on the way would read as zero where the
  // process flushes those (torch.set_flush_denormal).
  return float_from_bits(sign | bits_from_float(static_cast<float>(magnitude) * 0x1p-24f));
}

TRELLIS_ANYWHERE inline uint16_t half_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return sign | 0x7E00u;
  if (magnitude >= 0x477FF000u) return sign | 0x7C00u;  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the spacing is fixed: adding 0.5 lets float addition do the rounding.
    const float rounded = float_from_bits(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(bits_from_float(rounded) - 0x3F000000u);
  }
  magnitude += 0xFFFu + (magnitude >> 13 & 1u);
  return sign | static_cast<uint16_t>((magnitude - 0x38000000u) >> 13);
}

TRELLIS_ANYWHERE inline float float_from_bfloat16(uint16_t value) {
  return float_from_bits(static_cast<uint32_t>(value) << 16);
}

TRELLIS_ANYWHERE inline uint16_t bfloat16_from_float(float value) {
  const uint32_t bits = bits_from_float(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}

TRELLIS_ANYWHERE inline float load(const void* data, int64_t index, DType dtype) {
  switch (dtype) {
    case DType::Half:
      return float_from_half(static_cast<const uint16_t*>(data)[index]);
    case DType::BFloat16:
      return float_from_bfloat16(static_cast<const uint16_t*>(data)[index]);
    default:
      return static_cast<const float*>(data)[index];
  }
}

TRELLIS_ANYWHERE inline void store(void* data, int64_t index, DType dtype, float value) {
  switch (dtype) {
    case DType::Half:
      static_cast<uint16_t*>(data)[index] = half_from_float(value);
      return;
    case DType::BFloat16:
      static_cast<uint16_t*>(data)[index] = bfloat16_from_float(value);
      return;
    default:
      static_cast<float*>(data)[index] = value;
  }
}

}  // namespace trellis
