// The GEMM with NEON, which every 64-bit ARM processor has.
#ifdef __aarch64__
#include <arm_neon.h>

#include "slab_integer.h"

namespace trellis {
namespace {

// Four vectors make a strip, eight states each. Where the two words that hold a state are in sixteen bytes
// of the tile, and by how much they are shifted.
template <int kWords, int kVector>
struct Eight {
  alignas(16) uint8_t first[16], second[16];
  alignas(16) int16_t left[8], right[8];  // negative: to the right
  int begin;  // 32-bit word of the tile at which those bytes begin; -1: the last one comes first

  constexpr Eight() : first(), second(), left(), right(), begin() {
    const int start = state_begin(kVector * 8, kWords);
    begin = start < 0 ? -1 : std::min(start / 32, kWords / 2 - 4);
    for (int i = 0; i < 8; ++i) {
      const int bit = state_begin(kVector * 8 + i, kWords) - 32 * begin;
      for (int byte = 0; byte < 2; ++byte) {
        // Words are stored in exchanged pairs.
        first[i * 2 + byte] = static_cast<uint8_t>(((bit / 16) ^ 1) * 2 + byte);
        second[i * 2 + byte] = static_cast<uint8_t>((((bit / 16 + 1) ^ 1) * 2 + byte) & 15);
      }
      left[i] = static_cast<int16_t>(bit % 16);
      right[i] = static_cast<int16_t>(bit % 16 - 16);
    }
  }
};

struct Neon {
  static constexpr int kLanes = 8, kRowsAtOnce = 1;
  template <int kWords>
  using Layout = Strips<Neon, kWords>;
  using Words = int16x8_t;
  struct Lanes {
    int32x4_t column[2];
  };

  static Words load(const int16_t* from) { return vld1q_s16(from); }
  static void store(int16_t* to, Words words) { vst1q_s16(to, words); }
  static Lanes zero() { return {{vdupq_n_s32(0), vdupq_n_s32(0)}}; }
  // Four words of each column.
  static void dot(Lanes& lanes, Words a, Words b) {
    lanes.column[0] = vmlal_s16(lanes.column[0], vget_low_s16(a), vget_low_s16(b));
    lanes.column[1] = vmlal_high_s16(lanes.column[1], a, b);
  }

  template <int kWords, int kVector>
  static Words states(const int16_t* tile) {
    static constexpr Eight<kWords, kVector> kPlaces;
    uint8x16_t near;
    if constexpr (kPlaces.begin < 0)
      near = vextq_u8(vreinterpretq_u8_s16(vld1q_s16(tile + kWords - 8)),
                      vreinterpretq_u8_s16(vld1q_s16(tile)), 12);
    else
      near = vreinterpretq_u8_s16(vld1q_s16(tile + 2 * kPlaces.begin));
    const auto words = [&](const uint8_t* places) {
      return vreinterpretq_u16_u8(vqtbl1q_u8(near, vld1q_u8(places)));
    };
    return vreinterpretq_s16_u16(
        vorrq_u16(vshlq_u16(words(kPlaces.first), vld1q_s16(kPlaces.left)),
                  vshlq_u16(words(kPlaces.second), vld1q_s16(kPlaces.right))));
  }

  // sums[16] += what the lanes of the strips of a tile add up to, times `scale`.
  static void add_columns(const Lanes (&strips)[kStrips], float scale, float* sums) {
    for (int h = 0; h < 2; ++h) {
      for (int s = 0; s < kStrips; s += 4, sums += 4) {
        const int32x4_t a = vpaddq_s32(strips[s].column[h], strips[s + 1].column[h]);
        const int32x4_t b = vpaddq_s32(strips[s + 2].column[h], strips[s + 3].column[h]);
        vst1q_f32(sums, vfmaq_n_f32(vld1q_f32(sums), vcvtq_f32_s32(vpaddq_s32(a, b)), scale));
      }
    }
  }

  static void magnitudes(const float* x, int depth, float* largest, float* sum) {
    float32x4_t most = vdupq_n_f32(0), total = vdupq_n_f32(0);
    for (int i = 0; i < depth * 16; i += 4) {
      const float32x4_t magnitude = vabsq_f32(vld1q_f32(x + i));
      most = vmaxq_f32(most, magnitude);
      total = vaddq_f32(total, magnitude);
    }
    *largest = vmaxvq_f32(most);
    *sum = vaddvq_f32(total);
  }

  static void round(int, const float* x, int depth, float factor, int16_t (*words)[kStrip],
                    int* total) {
    int32x4_t sum = vdupq_n_s32(0);
    for (int k = 0; k < depth; ++k) {
      int32x4_t rounded[4];
      for (int i = 0; i < 4; ++i) {
        rounded[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(x + k * 16 + i * 4), factor));
        sum = vaddq_s32(sum, rounded[i]);
      }
      // Inputs 0, 1, 8, 9 and so on, pair by pair, each four for both columns.
      const uint32x4_t a =
          vreinterpretq_u32_s16(vqmovn_high_s32(vqmovn_s32(rounded[0]), rounded[1]));
      const uint32x4_t b =
          vreinterpretq_u32_s16(vqmovn_high_s32(vqmovn_s32(rounded[2]), rounded[3]));
      const uint64x2_t first = vreinterpretq_u64_u32(vzip1q_u32(a, b));
      const uint64x2_t second = vreinterpretq_u64_u32(vzip2q_u32(a, b));
      const uint64x2_t fours[4] = {vdupq_laneq_u64(first, 0), vdupq_laneq_u64(first, 1),
                                   vdupq_laneq_u64(second, 0), vdupq_laneq_u64(second, 1)};
      for (int i = 0; i < 4; ++i) store(words[k] + i * 8, vreinterpretq_s16_u64(fours[i]));
    }
    *total = vaddvq_s32(sum);
  }

  // The hashes of eight states, four each.
  struct Hashes {
    uint32x4_t first, second;
  };

  template <int kCodebook>
  static Hashes hashes(Words states) {
    constexpr Hash kHash = hash_of(kCodebook);
    const uint16x8_t words = vreinterpretq_u16_s16(states);
    const uint32x4_t addend = vdupq_n_u32(kHash.addend);
    return {vmlaq_n_u32(addend, vmovl_u16(vget_low_u16(words)), kHash.multiplier),
            vmlaq_n_u32(addend, vmovl_high_u16(words), kHash.multiplier)};
  }

  template <int kCodebook>
  struct TwoHalves : HalvesRange {
    static int32x4_t rounded(uint32x4_t hash) {
      const uint16x8_t halves = vreinterpretq_u16_u32(
          veorq_u32(vandq_u32(hash, vdupq_n_u32(kHalvesAnd)), vdupq_n_u32(kHalvesXor)));
      const auto widened = [](uint16x8_t of) {
        return vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32(vreinterpretq_u32_u16(of))));
      };
      const float32x4_t sum =
          vaddq_f32(widened(halves),
                    widened(vreinterpretq_u16_u32(vshrq_n_u32(vreinterpretq_u32_u16(halves), 16))));
      return vcvtnq_s32_f32(vmulq_n_f32(sum, 1 / kScale));
    }

    Words value(Words states) const {
      const Hashes hash = hashes<kCodebook>(states);
      return vcombine_s16(vmovn_s32(rounded(hash.first)), vmovn_s32(rounded(hash.second)));
    }
  };

  struct ByteSum : ByteSumRange {
    Words value(Words states) const {
      const Hashes hash = hashes<kMul1>(states);
      const auto pairs = [](uint32x4_t of) { return vpaddlq_u8(vreinterpretq_u8_u32(of)); };
      return vreinterpretq_s16_u16(vpaddq_u16(pairs(hash.first), pairs(hash.second)));
    }
  };

  struct Lookup : LookupRange {
    const float* values;

    Words value(Words states) const {
      alignas(16) uint16_t index[8];
      alignas(16) float found[8];
      vst1q_u16(index, vreinterpretq_u16_s16(states));
      for (int i = 0; i < 8; ++i) found[i] = values[index[i]];
      const auto rounded = [](const float* from) {
        return vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from), 1 / kScale));
      };
      return vcombine_s16(vmovn_s32(rounded(found)), vmovn_s32(rounded(found + 4)));
    }
  };
};

}  // namespace

const SlabKernels& neon_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<Neon>>("neon");
  return kernels;
}

}  // namespace trellis
#endif
