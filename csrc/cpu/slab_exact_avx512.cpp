// A column block times rows with AVX-512 in float32, from values rounded to FP16 as the codebooks define
// them: for layers that others follow, whose errors add up. Weights are decoded sixteen at a time, in the
// order of the stream, and never rearranged.
//
// Sixteen weights of a tile, one vector, belong to two columns, eight inputs each; the activations are
// permuted to match, and each of a tile's eight pairs of columns has a vector of sums, whose lanes are
// added once at the end. So a vector costs its decoding and one multiply-add for each row.
#ifdef TRELLIS_X86
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../rates.h"
#include "avx512.h"
#include "codebook.h"
#include "layer.h"

namespace trellis {
namespace {

constexpr int kVectors = 16;  // of a tile
constexpr int kPairs = 8;     // pairs of columns of a tile: c and c + 8, vectors 2 c and 2 c + 1

// Where sixteen states lie in the stream. A state is the 16 bits that end with its symbol; counted
// from the word before the tile's first, it begins where its symbol ends. At half rates vectors
// begin at odd bytes in turn, hence two tables.
template <int kWords>
struct Places {
  alignas(64) int16_t words[2][32];  // for each lane the second and the first word
  alignas(64) int32_t shifts[2][16];

  constexpr Places() : words(), shifts() {
    for (int parity = 0; parity < 2; ++parity) {
      for (int lane = 0; lane < 16; ++lane) {
        const int bit = parity * kWords % 16 + (lane + 1) * kWords / 16;
        words[parity][2 * lane] = static_cast<int16_t>(bit / 16 + 1);
        words[parity][2 * lane + 1] = static_cast<int16_t>(bit / 16);
        shifts[parity][lane] = 16 - bit % 16;
      }
    }
  }
};

// A tile's stream: the word before the first (the last one), its words, and room for wide loads.
template <int kWords>
struct Stream {
  alignas(64) uint16_t words[1 + kWords + 40];

  void set(const int16_t* tile) {
    // Words are stored in exchanged pairs.
    for (int i = 0; i < kWords; i += 8) {
      const __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tile + i));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(words + 1 + i), _mm_rol_epi32(pairs, 16));
    }
    words[0] = words[kWords];
  }

  template <int kVector>
  __m512i states() const {
    static constexpr Places<kWords> kPlaces;
    constexpr int kFirst = kVector * kWords / 16, kParity = kVector % 2;
    const __m512i near = _mm512_loadu_si512(words + kFirst);
    const __m512i pairs = _mm512_permutexvar_epi16(_mm512_load_si512(kPlaces.words[kParity]), near);
    const __m512i aligned = _mm512_srlv_epi32(pairs, _mm512_load_si512(kPlaces.shifts[kParity]));
    return _mm512_and_si512(aligned, _mm512_set1_epi32(0xFFFF));
  }
};

// A codebook: `value` of sixteen states.

inline __m512 rounded(__m512 value) {
  return _mm512_cvtph_ps(_mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// 3inst, mcg: the sum of the two FP16 halves of a hash.
template <int kCodebook>
struct TwoHalves {
  static constexpr Hash kHash = hash_of(kCodebook);
  // The bits of an FP16 number, moved to where float32 has them, are the number times 2^-112: the
  // exponents' biases differ by 112, and no half of a hash is subnormal.
  static constexpr float kScale = 0x1p112f;

  static __m512 widened(__m512i hash) {  // of which the upper 16 bits count
    const __m512i magnitude = _mm512_ternarylogic_epi32(hash, _mm512_set1_epi32(0x0FFF0000),
                                                        _mm512_set1_epi32(0x3B600000), 0x6A);
    const __m512i sign = _mm512_set1_epi32(INT32_MIN);
    return _mm512_castsi512_ps(
        _mm512_ternarylogic_epi32(_mm512_srli_epi32(magnitude, 3), hash, sign, 0xF8));
  }

  __m512 value(__m512i states) const {
    __m512i product =
        _mm512_mullo_epi32(states, _mm512_set1_epi32(static_cast<int>(kHash.multiplier)));
    if constexpr (kHash.addend != 0)
      product = _mm512_add_epi32(product, _mm512_set1_epi32(static_cast<int>(kHash.addend)));
    const __m512 sum = _mm512_add_ps(widened(product), widened(_mm512_slli_epi32(product, 16)));
    return rounded(_mm512_mul_ps(sum, _mm512_set1_ps(kScale)));
  }
};

// mul1: affine in the sum of a hash's four bytes.
struct ByteSum {
  __m512 value(__m512i states) const {
    const __m512i product =
        _mm512_mullo_epi32(states, _mm512_set1_epi32(static_cast<int>(hash_of(kMul1).multiplier)));
    const __m512i pairs = _mm512_maddubs_epi16(product, _mm512_set1_epi8(1));
    const __m512 sum = _mm512_cvtepi32_ps(_mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
    return rounded(_mm512_fmadd_ps(sum, _mm512_set1_ps(kMul1Scale), _mm512_set1_ps(kMul1Offset)));
  }
};

// Any codebook, from its table.
struct Lookup {
  const float* values;

  __m512 value(__m512i states) const { return _mm512_i32gather_ps(states, values, 4); }
};

template <int kWords, typename Codebook, int... kVector>
inline void decode_tile(const Stream<kWords>& stream, const Codebook& codebook, float* weights,
                        std::integer_sequence<int, kVector...>) {
  (_mm512_store_ps(weights + kVector * 16, codebook.value(stream.template states<kVector>())), ...);
}

// Adds the products of `depth` decoded tiles, one above the other, to the sums of kRows rows.
template <int kRows>
inline void multiply(const float* weights, int depth, const float* x, int64_t x_stride, float* sums,
                     int64_t sums_stride) {
  // Lane l of an even vector has input (l / 4 & 2) + (l & 1) + 8 * (l >> 1 & 1), of an odd one 4 more.
  const __m512i even = _mm512_setr_epi32(0, 1, 8, 9, 0, 1, 8, 9, 2, 3, 10, 11, 2, 3, 10, 11);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(4));
  __m512 sum[kRows][kPairs];
  for (int r = 0; r < kRows; ++r)
    for (int pair = 0; pair < kPairs; ++pair)
      sum[r][pair] = _mm512_load_ps(sums + r * sums_stride + pair * 16);
  for (int k = 0; k < depth; ++k) {
    __m512 x_even[kRows], x_odd[kRows];
    for (int r = 0; r < kRows; ++r) {
      const __m512 inputs = _mm512_loadu_ps(x + r * x_stride + k * 16);
      x_even[r] = _mm512_permutexvar_ps(even, inputs);
      x_odd[r] = _mm512_permutexvar_ps(odd, inputs);
    }
    const float* const tile = weights + k * kVectors * 16;
    for (int pair = 0; pair < kPairs; ++pair) {
      const __m512 first = _mm512_load_ps(tile + pair * 32),
                   second = _mm512_load_ps(tile + pair * 32 + 16);
      for (int r = 0; r < kRows; ++r) {
        sum[r][pair] = _mm512_fmadd_ps(first, x_even[r], sum[r][pair]);
        sum[r][pair] = _mm512_fmadd_ps(second, x_odd[r], sum[r][pair]);
      }
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int pair = 0; pair < kPairs; ++pair)
      _mm512_store_ps(sums + r * sums_stride + pair * 16, sum[r][pair]);
}

// sums[row][tile][pair], each a vector, over all inputs. Eight tiles one above the other are decoded at
// a time (8 KiB, in the first-level cache), then every row passes over them.
template <int kWords, typename Codebook>
void accumulate(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                const float* x, int64_t x_stride, int rows, float* sums) {
  constexpr int kDepth = 8;
  constexpr int64_t kTileFloats = kPairs * 16, kRowFloats = 8 * kTileFloats;
  alignas(64) float weights[kDepth * kVectors * 16];
  Stream<kWords> streams[kDepth];
  for (int64_t in_tile = 0; in_tile < w.in_tiles; in_tile += kDepth) {
    const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
    for (int t = 0; t < tiles; ++t) {
      const int16_t* const packed = w.trellis + (in_tile * w.out_tiles + out_tile + t) * kWords;
      for (int k = 0; k < depth; ++k) {
        streams[k].set(packed + k * w.out_tiles * kWords);
        // The same tile of the next eight rows of tiles, which no hardware foresees.
        if (in_tile + kDepth + k < w.in_tiles) {
          const char* const next =
              reinterpret_cast<const char*>(packed + (kDepth + k) * w.out_tiles * kWords);
          for (int byte = 0; byte < kWords * 2; byte += 64) _mm_prefetch(next + byte, _MM_HINT_T0);
        }
      }
      for (int k = 0; k < depth; ++k)
        decode_tile(streams[k], codebook, weights + k * kVectors * 16,
                    std::make_integer_sequence<int, kVectors>{});
      const float* const inputs = x + in_tile * 16;
      float* const to = sums + t * kTileFloats;
      int r = 0;
      for (; r + 2 <= rows; r += 2)
        multiply<2>(weights, depth, inputs + r * x_stride, x_stride, to + r * kRowFloats,
                    kRowFloats);
      if (r < rows)
        multiply<1>(weights, depth, inputs + r * x_stride, x_stride, to + r * kRowFloats,
                    kRowFloats);
    }
  }
}

template <int kWords>
void accumulate_rate(const Matrix& w, int64_t out_tile, int tiles, const float* x, int64_t x_stride,
                     int rows, float* sums) {
  const auto with = [&](const auto& codebook) {
    accumulate<kWords>(w, codebook, out_tile, tiles, x, x_stride, rows, sums);
  };
  switch (w.codebook) {
    case kInst3:
      return with(TwoHalves<kInst3>{});
    case kMcg:
      return with(TwoHalves<kMcg>{});
    case kMul1:
      return with(ByteSum{});
    default:
      return with(Lookup{w.values});
  }
}

void product(const Matrix& w, int64_t out_tile, int tiles, const float* x, int64_t x_stride,
             int rows, float* sums) {
  alignas(64) static thread_local float vectors[kRowBlock * 8 * kPairs * 16];
  std::memset(vectors, 0, sizeof(float) * rows * 8 * kPairs * 16);
  with_rate(w.tile_words, [&](auto words) {
    accumulate_rate<words.value>(w, out_tile, tiles, x, x_stride, rows, vectors);
  });
  for (int r = 0; r < rows; ++r) {
    for (int t = 0; t < 8; ++t) {
      for (int pair = 0; pair < kPairs; ++pair) {
        // Lanes 0..3 and 8..11 are column `pair`, the others column `pair` + 8.
        const float* const v = vectors + ((r * 8 + t) * kPairs + pair) * 16;
        float* const to = sums + r * kSlabColumns + t * 16 + pair;
        to[0] = ((v[0] + v[1]) + (v[2] + v[3])) + ((v[8] + v[9]) + (v[10] + v[11]));
        to[8] = ((v[4] + v[5]) + (v[6] + v[7])) + ((v[12] + v[13]) + (v[14] + v[15]));
      }
    }
  }
}

}  // namespace

const SlabKernels& exact_avx512_slab_kernels() {
  static const SlabKernels kernels = [] {
    SlabKernels same = avx512_slab_kernels();
    same.name = "avx512 exact";
    same.product = product;
    return same;
  }();
  return kernels;
}

}  // namespace trellis
#endif
