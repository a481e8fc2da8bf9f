// From packed words to codebook products, for every rate, in the fewest instructions per weight.
//
// A lane of a warp owns the eight weights 8 * lane .. 8 * lane + 7 of a tile: exactly its A fragment
// of an m16n8k16 MMA with output features as rows. Their states lie in one stretch of the stream;
// `Window` says which words hold it, `products` turns it into eight 32-bit products
// state * multiplier + addend. What a product means depends on the codebook:
//   3inst, mcg  the value is the sum of the two FP16 halves of (product & kHalvesAnd) ^ kHalvesXor
//   mul1        the value is affine in the sum of the product's four bytes
//
// The integer ALU pipe (shift, logic, permute) is the wall, so work moves to the multiply pipe:
//   pair trick  two states 16 bits apart share a window w: with q = (w >> 16) * C the low half's
//               product is w * C - (q << 16), a multiply-add in place of a mask
//   top trick   another state is lifted to the top of the register by a multiply with a power of
//               two, so that one shift extracts it with no mask
// decode/sass_counts.py counts what comes of it per weight; README.md beside it has the table.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "../../cpu/codebook.h"
#include "../common/ptx.cuh"

namespace trellis::cuda {

// The multiplier as a constant: in a register it would be one operand more than the register file delivers
// on time (5 to 10 % of a kernel that decodes). An instruction takes one such constant, so the addend is held.
template <int kCodebook>
__device__ __forceinline__ Hash hash_for() {
  constexpr Hash kHash = hash_of(kCodebook);
  return {kHash.multiplier, kHash.addend == 0 ? 0 : hold(kHash.addend)};
}

// 2^i, as a kernel argument: a value the compiler does not know, so that it cannot turn the multiply
// back into a shift.
struct PowersOfTwo {
  uint32_t of[17];
};

inline PowersOfTwo powers_of_two() {
  PowersOfTwo powers;
  for (int i = 0; i < 17; ++i) powers.of[i] = 1u << i;
  return powers;
}

// Where the eight states of a lane lie, counted in bits from the end of the lane's stretch upwards.
template <int kTileWords>
struct Window {
  static constexpr int kWords32 = kTileWords / 2;   // 32-bit words of a tile
  static constexpr int kLaneBits = kTileWords / 2;  // stream bits of eight weights
  // Distance from the end of the stretch to the end of state j.
  __host__ __device__ static constexpr int offset(int j) {
    return kLaneBits - (j + 1) * kTileWords / 16;
  }
  // The stretch ends inside a word, up to this many bits above the word's end.
  static constexpr int kMaxSkew = kLaneBits % 32 == 0   ? 0
                                  : kLaneBits % 16 == 0 ? 16
                                  : kLaneBits % 8 == 0  ? 24
                                                        : 28;
  static constexpr int kSpan = (offset(0) + 16 + kMaxSkew + 31) / 32;  // words that a lane reads

  int index[3];  // of those words in the tile, the last one first
  int skew;

  __device__ explicit Window(int lane) {
    const int end = (lane + 1) * kLaneBits;
    const int last = (end - 1) / 32;
    skew = 32 * (last + 1) - end;
    for (int i = 0; i < 3; ++i) index[i] = (last - i + kWords32) % kWords32;
  }
};

// v[0] holds the last 32 bits of the lane's stretch, v[1] those before, and so on. word(i) reads a
// word of the tile.
template <int kTileWords, typename Word>
__device__ __forceinline__ void load_stretch(Word word, const Window<kTileWords>& window,
                                             uint32_t (&v)[3]) {
  using W = Window<kTileWords>;
  uint32_t w[4] = {};
#pragma unroll
  for (int i = 0; i < W::kSpan; ++i) w[i] = word(window.index[i]);
#pragma unroll
  for (int i = 0; i < 3; ++i)
    v[i] = W::kMaxSkew == 0 ? w[i] : __funnelshift_r(w[i], w[i + 1], window.skew);
}

// How each of the eight states is taken out, decided at compile time.
struct Plan {
  int partner[8];  // the state 16 bits above that shares this one's window, or -1
  bool shared[8];  // taken together with the state 16 bits below
  int start[8];    // offset of the 32-bit window that holds the state
};

template <int kTileWords>
__host__ __device__ constexpr Plan plan() {
  using W = Window<kTileWords>;
  Plan result{};
  int start = -64;
  for (int j = 7; j >= 0; --j) {
    result.partner[j] = -1;
    for (int i = 0; i < j && !result.shared[j]; ++i) {
      if (W::offset(i) != W::offset(j) + 16) continue;
      result.partner[j] = i;
      result.shared[i] = true;
    }
    // A window at a word boundary is there already; else one funnel shift serves every state that
    // lies within it.
    const int offset = W::offset(j);
    if (result.partner[j] >= 0) {
      result.start[j] = offset;
    } else if (offset % 32 <= 16) {
      result.start[j] = offset / 32 * 32;
    } else {
      if (offset > start + 16) start = offset;
      result.start[j] = start;
    }
  }
  return result;
}

// The eight products of a lane. Without the pair trick less falls to the multiply pipe, which is for
// codebooks that need that pipe afterwards.
template <int kTileWords, bool kPairTrick = true>
__device__ __forceinline__ void products(const uint32_t (&v)[3], const Hash hash,
                                         const PowersOfTwo& powers, uint32_t (&p)[8]) {
  constexpr Plan kPlan = plan<kTileWords>();
  // With the addend in q already, q << 16 takes addend << 16 too much away.
  const uint32_t low_addend = hash.addend + (hash.addend << 16);
#pragma unroll
  for (int j = 7; j >= 0; --j) {
    if (kPlan.shared[j]) continue;
    const int start = kPlan.start[j];
    const uint32_t w = start % 32 == 0
                           ? v[start / 32]
                           : __funnelshift_r(v[start / 32], v[start / 32 + 1], start % 32);
    if (kPlan.partner[j] >= 0) {
      const uint32_t q = (w >> 16) * hash.multiplier + hash.addend;
      p[kPlan.partner[j]] = q;
      if constexpr (!kPairTrick) {
        p[j] = (w & 0xFFFFu) * hash.multiplier + hash.addend;
        continue;
      }
      p[j] = q * 0xFFFF0000u + (w * hash.multiplier + low_addend);
      continue;
    }
    const int bit = Window<kTileWords>::offset(j) - start;
    const uint32_t state = bit == 0 ? w & 0xFFFFu : (w * powers.of[16 - bit]) >> 16;
    p[j] = state * hash.multiplier + hash.addend;
  }
}

// 3inst, mcg: the two FP16 halves whose sum is the value.
__device__ __forceinline__ uint32_t halves(uint32_t product) {
  uint32_t result;
  asm("lop3.b32 %0, %1, 0x8fff8fff, 0x3b603b60, 0x6a;" : "=r"(result) : "r"(product));
  return result;
}

// Two codebook values in FP16, bit-exact: 3inst and mcg from two products ...
__device__ __forceinline__ uint32_t value_pair_halves(uint32_t first, uint32_t second) {
  first = halves(first), second = halves(second);
  const __half2 a = reinterpret_cast<const __half2&>(first),
                b = reinterpret_cast<const __half2&>(second);
  // Additions choose the halves of their operands for nothing; packing first would take one more
  // permute, which the integer pipe has no room for.
  const __half2 low = __hadd2(__low2half2(a), __high2half2(a)),
                high = __hadd2(__low2half2(b), __high2half2(b));
  return __byte_perm(reinterpret_cast<const uint32_t&>(low),
                     reinterpret_cast<const uint32_t&>(high), 0x5410);
}

// ... and mul1: 0x6400 + sum of bytes is the FP16 number 1024 + sum; one fused multiply-add follows.
__device__ __forceinline__ uint32_t value_pair_mul1(uint32_t first, uint32_t second) {
  const uint32_t pair = __byte_perm(__dp4a(first, 0x01010101u, 0x6400u),
                                    __dp4a(second, 0x01010101u, 0x6400u), 0x5410);
  const uint32_t scale = 0x1EEE1EEEu, offset = 0xC931C931u;
  const __half2 value =
      __hfma2(reinterpret_cast<const __half2&>(pair), reinterpret_cast<const __half2&>(scale),
              reinterpret_cast<const __half2&>(offset));
  return reinterpret_cast<const uint32_t&>(value);
}

// A lane's eight values as its A fragment of m16n8k16.
template <bool kMul1>
__device__ __forceinline__ void packed_values(const uint32_t (&p)[8], uint32_t (&a)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int pair = i / 2 + i % 2 * 2;  // the fragment has rows 8..15 before columns 8..15
    a[i] = kMul1 ? value_pair_mul1(p[2 * pair], p[2 * pair + 1])
                 : value_pair_halves(p[2 * pair], p[2 * pair + 1]);
  }
}

}  // namespace trellis::cuda
