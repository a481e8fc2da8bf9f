// The GEMM with AVX2 and FMA.
#ifdef TRELLIS_X86
#include <immintrin.h>

#include "slab_integer.h"

namespace trellis {
namespace {

// Two vectors make a strip, each lane of 128 bits eight states. Where the two words that hold a state are
// in sixteen bytes of the tile, and by how much they are shifted: multiplied by a power of two, since AVX2
// has no shift for each word of its own.
template <int kWords, int kVector>
struct Eights {
  alignas(32) uint8_t first[32], second[32];
  alignas(32) int16_t powers[16];
  int begin[2];  // 32-bit word of the tile at which those bytes begin; -1: the last one comes first

  constexpr Eights() : first(), second(), powers(), begin() {
    for (int lane = 0; lane < 2; ++lane) {
      const int start = state_begin(kVector * 16 + lane * 8, kWords);
      begin[lane] = start < 0 ? -1 : std::min(start / 32, kWords / 2 - 4);
      for (int i = 0; i < 8; ++i) {
        const int bit = state_begin(kVector * 16 + lane * 8 + i, kWords) - 32 * begin[lane];
        for (int byte = 0; byte < 2; ++byte) {
          const int at = lane * 16 + i * 2 + byte;
          // Words are stored in exchanged pairs.
          first[at] = static_cast<uint8_t>(((bit / 16) ^ 1) * 2 + byte);
          second[at] = static_cast<uint8_t>((((bit / 16 + 1) ^ 1) * 2 + byte) & 15);
        }
        powers[lane * 8 + i] = static_cast<int16_t>(1 << bit % 16);
      }
    }
  }
};

struct Avx2 {
  static constexpr int kLanes = 16, kRowsAtOnce = 1;
  using Words = __m256i;
  using Lanes = __m256i;
  template <int kWords>
  using Layout = Strips<Avx2, kWords>;

  static Words load(const int16_t* from) {
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(from));
  }
  static Words load(const uint8_t* from) { return load(reinterpret_cast<const int16_t*>(from)); }
  static void store(int16_t* to, Words words) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), words);
  }
  static Lanes zero() { return _mm256_setzero_si256(); }
  static void dot(Lanes& lanes, Words a, Words b) {
    lanes = _mm256_add_epi32(lanes, _mm256_madd_epi16(a, b));
  }

  // Sixteen bytes from 32-bit word `begin` on.
  template <int kWords>
  static __m128i window(const int16_t* tile, int begin) {
    const auto at = [&](int word) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + word));
    };
    if (begin >= 0) return at(2 * begin);
    return _mm_alignr_epi8(at(0), at(kWords - 8), 12);
  }

  template <int kWords, int kVector>
  static Words states(const int16_t* tile) {
    static constexpr Eights<kWords, kVector> kPlaces;
    const __m256i near = _mm256_set_m128i(window<kWords>(tile, kPlaces.begin[1]),
                                          window<kWords>(tile, kPlaces.begin[0]));
    const __m256i first = _mm256_shuffle_epi8(near, load(kPlaces.first));
    const __m256i second = _mm256_shuffle_epi8(near, load(kPlaces.second));
    const __m256i powers = load(kPlaces.powers);
    return _mm256_or_si256(_mm256_mullo_epi16(first, powers), _mm256_mulhi_epu16(second, powers));
  }

  // sums[16] += what the lanes of the strips of a tile add up to, times `scale`. Of a lane's index, bit 1
  // tells the column of its strip; over the others the sum is taken, two vectors becoming one.
  static void add_columns(const Lanes (&strips)[kStrips], float scale, float* sums) {
    __m256 fours[2];
    for (int i = 0; i < 2; ++i) {
      __m256i twos[2];
      for (int j = 0; j < 2; ++j) {
        const __m256i a = strips[4 * i + 2 * j], b = strips[4 * i + 2 * j + 1];
        twos[j] = _mm256_add_epi32(_mm256_permute2x128_si256(a, b, 0x20),
                                   _mm256_permute2x128_si256(a, b, 0x31));
      }
      const __m256 a = _mm256_castsi256_ps(twos[0]), b = _mm256_castsi256_ps(twos[1]);
      fours[i] =
          _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88)),
                                               _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xDD))));
    }
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    const auto add = [&](__m256 columns, float* to) {
      const __m256i ordered = _mm256_permutevar8x32_epi32(_mm256_castps_si256(columns), order);
      _mm256_storeu_ps(to, _mm256_fmadd_ps(_mm256_cvtepi32_ps(ordered), _mm256_set1_ps(scale),
                                           _mm256_loadu_ps(to)));
    };
    add(_mm256_shuffle_ps(fours[0], fours[1], 0x88), sums);
    add(_mm256_shuffle_ps(fours[0], fours[1], 0xDD), sums + 8);
  }

  static void magnitudes(const float* x, int depth, float* largest, float* sum) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps(), total = _mm256_setzero_ps();
    for (int i = 0; i < depth * 16; i += 8) {
      const __m256 magnitude = _mm256_andnot_ps(sign, _mm256_loadu_ps(x + i));
      most = _mm256_max_ps(most, magnitude);
      total = _mm256_add_ps(total, magnitude);
    }
    alignas(32) float lanes[8];
    _mm256_store_ps(lanes, most);
    *largest = *std::max_element(lanes, lanes + 8);
    _mm256_store_ps(lanes, total);
    *sum = 0;
    for (float lane : lanes) *sum += lane;
  }

  static void round(int, const float* x, int depth, float factor, int16_t (*words)[kStrip],
                    int* total) {
    // A lane of packed words has eight inputs, of which each four serve two columns.
    const __m256i order = _mm256_setr_epi8(0, 1, 2, 3, 8, 9, 10, 11, 0, 1, 2, 3, 8, 9, 10, 11,  //
                                           4, 5, 6, 7, 12, 13, 14, 15, 4, 5, 6, 7, 12, 13, 14, 15);
    __m256i sum = _mm256_setzero_si256();
    const auto rounded = [&](const float* from) {
      return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from), _mm256_set1_ps(factor)));
    };
    for (int k = 0; k < depth; ++k) {
      const __m256i a = rounded(x + k * 16), b = rounded(x + k * 16 + 8);
      sum = _mm256_add_epi32(sum, _mm256_add_epi32(a, b));
      const __m256i packed = _mm256_packs_epi32(a, b);
      store(words[k], _mm256_shuffle_epi8(_mm256_permute2x128_si256(packed, packed, 0x00), order));
      store(words[k] + 16,
            _mm256_shuffle_epi8(_mm256_permute2x128_si256(packed, packed, 0x11), order));
    }
    alignas(32) int32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum);
    *total = 0;
    for (int lane : lanes) *total += lane;
  }

  // The hashes of sixteen states, their halves apart.
  struct Hashes {
    __m256i low, high;
  };

  template <int kCodebook>
  static Hashes hashes(Words states) {
    constexpr Hash kHash = hash_of(kCodebook);
    const auto word = [](uint32_t x) { return _mm256_set1_epi16(static_cast<int16_t>(x)); };
    const __m256i first = word(kHash.multiplier), second = word(kHash.multiplier >> 16);
    __m256i low = _mm256_mullo_epi16(states, first);
    __m256i high =
        _mm256_add_epi16(_mm256_mulhi_epu16(states, first), _mm256_mullo_epi16(states, second));
    if constexpr (kHash.addend != 0) {
      const __m256i added = word(kHash.addend);
      low = _mm256_add_epi16(low, added);
      high = _mm256_add_epi16(high, word((kHash.addend >> 16) + 1));
      // Minus one where nothing is carried: where the sum is no less than what was added.
      high = _mm256_add_epi16(high, _mm256_cmpeq_epi16(_mm256_max_epu16(low, added), low));
    }
    return {low, high};
  }

  // What follows must be inlined everywhere: no vector register outlives a call, so one would spill all sums.

  // A half of a hash is +-(1024 + mantissa) << e in units of 2^-13; e is two of its upper bits, exchanged.
  template <int kCodebook>
  struct TwoHalves : HalvesRange {
    static constexpr float kOffset = ties_up(kCodebook);

    [[gnu::always_inline]] static __m256i half(__m256i hash, __m256i power) {
      const __m256i mantissa = _mm256_xor_si256(_mm256_and_si256(hash, _mm256_set1_epi16(0x3FF)),
                                                _mm256_set1_epi16(0x400 | (kHalvesXor & 0x3FF)));
      const __m256i nonzero = _mm256_or_si256(hash, _mm256_set1_epi16(1));
      return _mm256_sign_epi16(_mm256_mullo_epi16(mantissa, power), nonzero);
    }

    [[gnu::always_inline]] Words value(Words states) const {
      const Hashes hash = hashes<kCodebook>(states);
      // Both halves' powers are looked up at once, by the lower four bits of their upper bytes.
      const __m256i index = _mm256_or_si256(
          _mm256_and_si256(_mm256_srli_epi16(hash.low, 8), _mm256_set1_epi16(0x000F)),
          _mm256_and_si256(hash.high, _mm256_set1_epi16(0x0F00)));
      const __m256i table = _mm256_broadcastsi128_si256(
          _mm_setr_epi8(4, 4, 4, 4, 8, 8, 8, 8, 1, 1, 1, 1, 2, 2, 2, 2));
      static_assert((kHalvesXor >> 10 & 3) == 2, "the table's order");
      const __m256i powers = _mm256_shuffle_epi8(table, index);
      const __m256i low = half(hash.low, _mm256_and_si256(powers, _mm256_set1_epi16(0x00FF)));
      const __m256i high = half(hash.high, _mm256_srli_epi16(powers, 8));
      // To a quarter of that, ties upwards.
      return _mm256_mulhrs_epi16(_mm256_add_epi16(low, high), _mm256_set1_epi16(1 << 13));
    }
  };

  struct ByteSum : ByteSumRange {
    [[gnu::always_inline]] Words value(Words states) const {
      const Hashes hash = hashes<kMul1>(states);
      const __m256i one = _mm256_set1_epi8(1);
      return _mm256_add_epi16(_mm256_maddubs_epi16(hash.low, one),
                              _mm256_maddubs_epi16(hash.high, one));
    }
  };

  struct Lookup : LookupRange {
    const float* values;

    [[gnu::always_inline]] Words value(Words states) const {
      const auto rounded = [&](__m256i index) {
        const __m256 found = _mm256_i32gather_ps(values, index, 4);
        return _mm256_cvtps_epi32(_mm256_mul_ps(found, _mm256_set1_ps(1 / kScale)));
      };
      const __m256i even = rounded(_mm256_and_si256(states, _mm256_set1_epi32(0xFFFF)));
      const __m256i odd = rounded(_mm256_srli_epi32(states, 16));
      return _mm256_blend_epi16(even, _mm256_slli_epi32(odd, 16), 0xAA);
    }
  };
};

}  // namespace

const SlabKernels& avx2_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Slab<Avx2>>("avx2");
  return kernels;
}

}  // namespace trellis
#endif
