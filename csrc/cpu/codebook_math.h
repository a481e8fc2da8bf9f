// The value of one state, for every codebook; on the CPU and on a GPU. Tables are inside functions, since
// a GPU sees no others.
#pragma once

#include <cstdint>

#include "codebook.h"
#include "numeric.h"

namespace trellis {

// Rounds to FP16 and back; every caller's argument is exact in float, so this is the one rounding.
TRELLIS_ANYWHERE inline float to_half(float value) {
  return float_from_half(half_from_float(value));
}

TRELLIS_ANYWHERE inline float two_halves(uint32_t x) {
  x = (x & kHalvesAnd) ^ kHalvesXor;
  return to_half(float_from_half(static_cast<uint16_t>(x)) +
                 float_from_half(static_cast<uint16_t>(x >> 16)));
}

TRELLIS_ANYWHERE inline float mul1(uint32_t x) {
  const uint32_t sum = (x & 255u) + (x >> 8 & 255u) + (x >> 16 & 255u) + (x >> 24);
  return to_half(static_cast<float>(1024u + sum) * kMul1Scale - kMul1Shift);
}

TRELLIS_ANYWHERE inline uint32_t sqg_rank(uint32_t state, int bits) {
  const int width = 16 - bits;
  const uint32_t low = (1u << width) - 1;
  const uint32_t history = state >> bits;
  uint32_t mixed = history ^ history >> 11;
  mixed ^= mixed << 11 & low;
  const uint32_t product = mixed * 0x3FA7D929u + 0xC928FD8Eu;
  uint32_t reversed = 0;
  for (int i = 0; i < bits; ++i) reversed |= (state >> i & 1u) << (bits - 1 - i);
  return (reversed ^ product >> (32 - bits)) << width | (product & low);
}

TRELLIS_ANYWHERE inline float t12(uint32_t rank) {
  // Upper half of the T12 law: (rank >> 4) - 2048 at which each E4M3 label 1, 2, ... starts.
  static constexpr int16_t kT12Thresholds[] = {
      1,    3,    5,    7,    10,   12,   14,   16,   18,   20,   22,   24,   27,   29,   31,
      33,   36,   40,   45,   49,   53,   57,   62,   66,   72,   81,   89,   98,   106,  115,
      123,  132,  145,  161,  178,  195,  212,  229,  246,  263,  288,  321,  355,  388,  421,
      454,  486,  519,  567,  630,  693,  754,  814,  873,  930,  986,  1068, 1170, 1267, 1356,
      1439, 1514, 1583, 1646, 1727, 1816, 1884, 1935, 1972, 1998, 2016, 2028, 2039, 2045, 2047};
  const int index = static_cast<int>(rank >> 4);
  const int offset = index < 2048 ? 2047 - index : index - 2048;
  int label = 0;
  for (int16_t threshold : kT12Thresholds) label += offset >= threshold;
  // An E4M3 code shifted by seven is the FP16 number 2^-8 times as large, subnormals included.
  const float magnitude = 256.0f * float_from_half(static_cast<uint16_t>(label << 7));
  return index < 2048 && label > 0 ? -magnitude : magnitude;
}

TRELLIS_ANYWHERE inline float d3l(uint32_t rank) {
  // The D3L law: FP16 base (high half) and slope (low half) of each linear piece.
  static constexpr uint32_t kD3lPieces[104] = {
      0x467d0000, 0x461d0000, 0x45ef0000, 0x45d00000, 0x45b80000, 0x45a50000, 0x45950000,
      0x45870000, 0x457b0000, 0x45700000, 0x45660000, 0x455d0000, 0x45540000, 0x454c0000,
      0x45450000, 0x453e0000, 0x45322600, 0x45272500, 0x451c2500, 0x45132500, 0x450a2500,
      0x45022400, 0x44fb2400, 0x44f42200, 0x44e72200, 0x44db2200, 0x44d120cd, 0x44c720cd,
      0x44be209a, 0x44b5209a, 0x44ae1e66, 0x44a62000, 0x44991e92, 0x448c1e55, 0x44811dab,
      0x44771d25, 0x446e1c92, 0x44651c00, 0x445c1c92, 0x44551adb, 0x44461b4b, 0x44391a85,
      0x442d19df, 0x442219a3, 0x4418192a, 0x440f18d6, 0x4406185d, 0x43fb1848, 0x43dd178d,
      0x43c116f0, 0x43a71650, 0x439015cd, 0x437a1571, 0x43661513, 0x435314bf, 0x43411472,
      0x431f1424, 0x43011380, 0x42e612e0, 0x42cd125a, 0x42b511ee, 0x429f1187, 0x428a112b,
      0x427610e7, 0x4252108b, 0x42311022, 0x42120f93, 0x41f60f05, 0x41dc0e8f, 0x41c40e23,
      0x41ac0dc7, 0x41970d74, 0x416e0d13, 0x41490ca1, 0x41270c44, 0x41070bee, 0x40e90b68,
      0x40cd0af9, 0x40b30a98, 0x409a0a40, 0x406b09d2, 0x40410957, 0x401908f4, 0x3fe808a0,
      0x3fa30859, 0x3f61081c, 0x3f2207d0, 0x3ee70774, 0x3e7606fd, 0x3e0f067b, 0x3dae0611,
      0x3d5205b9, 0x3cfb056f, 0x3ca80531, 0x3c5904fc, 0x3c0c04cd, 0x3af20493, 0x39dd0456,
      0x38d30427, 0x37a50403, 0x35b103e9, 0x338c03d6, 0x2f8603c9, 0x004c03c3};
  const bool negative = rank < 0x8000u;
  const int magnitude_rank = static_cast<int>((negative ? rank ^ 0x7FFFu : rank) & 0x7FFFu);
  const int tail = 65535 - 2 * magnitude_rank;
  int exponent = 0;
  while (tail >> (exponent + 1)) ++exponent;
  const int delta = tail - (1 << exponent);
  int piece, x = 0;
  if (exponent > 3) {
    const int shift = exponent - 3;
    const int cell = delta >> shift;
    piece = 8 * shift + cell;
    x = ((1 << exponent) + ((cell + 1) << shift) - 1 - tail) >> 1;
  } else {
    piece = (exponent > 0 ? 1 << (exponent - 1) : 1) + (delta > 0 ? (delta - 1) >> 1 : -1);
  }
  const float base = float_from_half(static_cast<uint16_t>(kD3lPieces[piece] >> 16));
  const float slope = float_from_half(static_cast<uint16_t>(kD3lPieces[piece]));
  const float value = to_half(slope * static_cast<float>(x) + base);
  return negative ? -value : value;
}

TRELLIS_ANYWHERE inline float value_of(int codebook, int bits, uint32_t state) {
  const Hash hash = hash_of(codebook);
  switch (codebook) {
    case kInst3:
    case kMcg:
      return two_halves(state * hash.multiplier + hash.addend);
    case kMul1:
      return mul1(state * hash.multiplier + hash.addend);
    case kSqgE4m3:
      return t12(sqg_rank(state, bits));
    default:
      return d3l(sqg_rank(state, bits));
  }
}

}  // namespace trellis
