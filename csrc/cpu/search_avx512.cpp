#ifdef TRELLIS_X86
#include "avx512.h"
#include "search.h"
#include "search_impl.h"

namespace trellis {
namespace {

// (l, j) -> (j, l): destination lane j * spans + l takes source lane l * G + j.
template <int G, int LANES, class T>
struct TransposeIndex {
  alignas(64) T lane[LANES];
  constexpr TransposeIndex() : lane() {
    for (int i = 0; i < LANES; ++i) lane[i] = static_cast<T>(i % (LANES / G) * G + i / (LANES / G));
  }
};

struct Int512 {
  using Block = __m512i;
  static Block set(uint16_t x) { return _mm512_set1_epi16(static_cast<short>(x)); }
  static Block min(Block a, Block b) { return _mm512_min_epu16(a, b); }
  static Block sub(Block a, Block b) { return _mm512_subs_epu16(a, b); }
  static void store(void* p, Block a) { _mm512_store_si512(p, a); }
  static Block quantize(const float* v, float scale) {
    const __m512 s = _mm512_set1_ps(scale);
    const __m256i lo =
        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(v), s)));
    const __m256i hi =
        _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(_mm512_mul_ps(_mm512_load_ps(v + 16), s)));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
  }

  template <int G>
  static void accumulate(Block& best, const int16_t* v, Block w, const uint16_t* c) {
    const Block d = _mm512_sub_epi16(_mm512_load_si512(v), w);
    best = min(best, _mm512_adds_epu16(_mm512_mulhrs_epi16(d, d), broadcast<G>(c)));
  }
  template <int G>
  static Block transpose(Block x) {
    static constexpr TransposeIndex<G, 32, uint16_t> index;
    return _mm512_permutexvar_epi16(_mm512_load_si512(index.lane), x);
  }
  static uint16_t lowest(Block x) {
    const __m256i y = _mm256_min_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    const __m128i z = _mm_min_epu16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(z)));
  }

 private:
  template <int G>
  static Block broadcast(const uint16_t* c) {
    if constexpr (G == 2) {
      int x;
      std::memcpy(&x, c, sizeof(x));
      return _mm512_set1_epi32(x);
    } else if constexpr (G == 4) {
      long long x;
      std::memcpy(&x, c, sizeof(x));
      return _mm512_set1_epi64(x);
    } else if constexpr (G == 8) {
      return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(c)));
    } else {
      return _mm512_broadcast_i64x4(_mm256_load_si256(reinterpret_cast<const __m256i*>(c)));
    }
  }
};

struct Float512 {
  using Block = __m512;
  static Block set(float x) { return _mm512_set1_ps(x); }
  static Block min(Block a, Block b) { return _mm512_min_ps(a, b); }
  static Block sub(Block a, Block b) { return _mm512_sub_ps(a, b); }
  static Block load(const float* p) { return _mm512_load_ps(p); }
  static void store(float* p, Block a) { _mm512_store_ps(p, a); }
  static float lowest(Block x) { return _mm512_reduce_min_ps(x); }
  static float multiply_add(float a, float b, float c) { return std::fma(a, b, c); }

  static void accumulate(Block& best, const float* v, Block w, Block c) {
    const Block d = _mm512_sub_ps(_mm512_load_ps(v), w);
    best = _mm512_min_ps(best, _mm512_fmadd_ps(d, d, c));
  }
  template <int G>
  static Block broadcast(const float* c) {
    if constexpr (G == 1) {
      return _mm512_set1_ps(*c);
    } else if constexpr (G == 2) {
      double x;
      std::memcpy(&x, c, sizeof(x));
      return _mm512_castpd_ps(_mm512_set1_pd(x));
    } else if constexpr (G == 4) {
      return _mm512_broadcast_f32x4(_mm_load_ps(c));
    } else {
      return _mm512_broadcast_f32x8(_mm256_load_ps(c));
    }
  }
  template <int G>
  static Block transpose(Block x) {
    if constexpr (G == 1 || G == 16) return x;
    static constexpr TransposeIndex<G, 16, uint32_t> index;
    return _mm512_permutexvar_ps(_mm512_load_si512(index.lane), x);
  }
  static float highest_magnitude(const float* v, int count) {
    Block high = _mm512_setzero_ps();
    for (int i = 0; i < count; i += 16)
      high = _mm512_max_ps(high, _mm512_abs_ps(_mm512_load_ps(v + i)));
    return _mm512_reduce_max_ps(high);
  }
};

}  // namespace

void search_tile_avx512(const float* target, const float* values, int tile_words, void* scratch,
                        uint16_t* states) {
  search_tile<Int512, Float512>(target, values, tile_words, scratch, states);
}

}  // namespace trellis
#endif
