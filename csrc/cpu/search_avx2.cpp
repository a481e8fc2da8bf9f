#ifdef TRELLIS_X86
#include <immintrin.h>

#include "search.h"
#include "search_impl.h"

namespace trellis {
namespace {

// A block is a pair of registers; `transpose` turns its lanes from (l, j) into (j, l).
struct Int256 {
  struct Block {
    __m256i lo, hi;
  };
  static Block set(uint16_t x) {
    const __m256i v = _mm256_set1_epi16(static_cast<short>(x));
    return {v, v};
  }
  static Block min(Block a, Block b) {
    return {_mm256_min_epu16(a.lo, b.lo), _mm256_min_epu16(a.hi, b.hi)};
  }
  static Block sub(Block a, Block b) {
    return {_mm256_subs_epu16(a.lo, b.lo), _mm256_subs_epu16(a.hi, b.hi)};
  }
  static void store(void* p, Block a) {
    _mm256_store_si256(static_cast<__m256i*>(p), a.lo);
    _mm256_store_si256(static_cast<__m256i*>(p) + 1, a.hi);
  }
  static Block quantize(const float* v, float scale) {
    return {quantize16(v, scale), quantize16(v + 16, scale)};
  }

  template <int G>
  static void accumulate(Block& best, const int16_t* v, Block w, const uint16_t* c) {
    // G divides 16, so both halves see the same old costs
    const __m256i cost = broadcast<G>(c);
    const __m256i* p = reinterpret_cast<const __m256i*>(v);
    const __m256i x = _mm256_sub_epi16(_mm256_load_si256(p), w.lo);
    const __m256i y = _mm256_sub_epi16(_mm256_load_si256(p + 1), w.hi);
    best = min(best, {_mm256_adds_epu16(_mm256_mulhrs_epi16(x, x), cost),
                      _mm256_adds_epu16(_mm256_mulhrs_epi16(y, y), cost)});
  }

  template <int G>
  static Block transpose(Block x) {
    const __m256i spread = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    if constexpr (G == 2) {
      const __m256i even_odd =
          _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9,
                           12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      const __m256i a = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x.lo, even_odd), 0xD8);
      const __m256i b = _mm256_permute4x64_epi64(_mm256_shuffle_epi8(x.hi, even_odd), 0xD8);
      return {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
    } else if constexpr (G == 4) {
      const __m256i pairs = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15,
                                             0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
      const __m256i a = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x.lo, pairs), spread);
      const __m256i b = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x.hi, pairs), spread);
      const __m256i even = _mm256_unpacklo_epi64(a, b), odd = _mm256_unpackhi_epi64(a, b);
      return {_mm256_permute2x128_si256(even, odd, 0x20),
              _mm256_permute2x128_si256(even, odd, 0x31)};
    } else if constexpr (G == 8) {
      const __m256i a = _mm256_permute2x128_si256(x.lo, x.hi, 0x20);
      const __m256i b = _mm256_permute2x128_si256(x.lo, x.hi, 0x31);
      return {_mm256_permutevar8x32_epi32(_mm256_unpacklo_epi16(a, b), spread),
              _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi16(a, b), spread)};
    } else {
      const __m256i a = _mm256_unpacklo_epi16(x.lo, x.hi), b = _mm256_unpackhi_epi16(x.lo, x.hi);
      return {_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31)};
    }
  }

  static uint16_t lowest(Block x) {
    const __m256i y = _mm256_min_epu16(x.lo, x.hi);
    const __m128i z = _mm_min_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(z)));
  }

 private:
  static __m256i quantize16(const float* v, float scale) {
    const __m256 s = _mm256_set1_ps(scale);
    const __m256i a = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(v), s));
    const __m256i b = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_load_ps(v + 8), s));
    return _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
  }
  template <int G>
  static __m256i broadcast(const uint16_t* c) {
    if constexpr (G == 2) {
      int x;
      std::memcpy(&x, c, sizeof(x));
      return _mm256_set1_epi32(x);
    } else if constexpr (G == 4) {
      long long x;
      std::memcpy(&x, c, sizeof(x));
      return _mm256_set1_epi64x(x);
    } else if constexpr (G == 8) {
      return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(c)));
    } else {
      return _mm256_load_si256(reinterpret_cast<const __m256i*>(c));
    }
  }
};

struct Float256 {
  struct Block {
    __m256 lo, hi;
  };
  static Block set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
  static Block min(Block a, Block b) {
    return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)};
  }
  static Block sub(Block a, Block b) {
    return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
  }
  static Block load(const float* p) { return {_mm256_load_ps(p), _mm256_load_ps(p + 8)}; }
  static void store(float* p, Block a) {
    _mm256_store_ps(p, a.lo);
    _mm256_store_ps(p + 8, a.hi);
  }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

  static void accumulate(Block& best, const float* v, Block w, Block c) {
    const __m256 x = _mm256_sub_ps(_mm256_load_ps(v), w.lo);
    const __m256 y = _mm256_sub_ps(_mm256_load_ps(v + 8), w.hi);
    best.lo = _mm256_min_ps(best.lo, _mm256_fmadd_ps(x, x, c.lo));
    best.hi = _mm256_min_ps(best.hi, _mm256_fmadd_ps(y, y, c.hi));
  }
  template <int G>
  static Block broadcast(const float* c) {
    __m256 x;
    if constexpr (G == 1) {
      x = _mm256_broadcast_ss(c);
    } else if constexpr (G == 2) {
      double pair;
      std::memcpy(&pair, c, sizeof(pair));
      x = _mm256_castpd_ps(_mm256_set1_pd(pair));
    } else if constexpr (G == 4) {
      x = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(c));
    } else {
      x = _mm256_load_ps(c);
    }
    return {x, x};
  }
  template <int G>
  static Block transpose(Block x) {
    if constexpr (G == 1 || G == 16) {
      return x;
    } else if constexpr (G == 2) {
      const __m256i even_odd = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
      const __m256 a = _mm256_permutevar8x32_ps(x.lo, even_odd);
      const __m256 b = _mm256_permutevar8x32_ps(x.hi, even_odd);
      return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
    } else if constexpr (G == 4) {
      const __m256i spread = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      const __m256d a = _mm256_castps_pd(_mm256_permutevar8x32_ps(x.lo, spread));
      const __m256d b = _mm256_castps_pd(_mm256_permutevar8x32_ps(x.hi, spread));
      const __m256 even = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
      const __m256 odd = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
      return {_mm256_permute2f128_ps(even, odd, 0x20), _mm256_permute2f128_ps(even, odd, 0x31)};
    } else {
      const __m256 a = _mm256_unpacklo_ps(x.lo, x.hi), b = _mm256_unpackhi_ps(x.lo, x.hi);
      return {_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31)};
    }
  }
  static float lowest(Block x) {
    const __m256 y = _mm256_min_ps(x.lo, x.hi);
    __m128 z = _mm_min_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_min_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_min_ss(z, _mm_movehdup_ps(z)));
  }
  static float highest_magnitude(const float* v, int count) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    __m256 high = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 8)
      high = _mm256_max_ps(high, _mm256_and_ps(magnitude, _mm256_load_ps(v + i)));
    float lane[8];
    _mm256_storeu_ps(lane, high);
    return *std::max_element(lane, lane + 8);
  }
};

}  // namespace

void search_tile_avx2(const float* target, const float* values, int tile_words, void* scratch,
                      uint16_t* states) {
  search_tile<Int256, Float256>(target, values, tile_words, scratch, states);
}

}  // namespace trellis
#endif
