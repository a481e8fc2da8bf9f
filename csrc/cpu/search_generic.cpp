#include "search.h"
#include "search_impl.h"

namespace trellis {
namespace {

// Plain loops over the lanes, in the shape that compilers vectorise.
template <class T, int LANES>
struct Lanes {
  struct Block {
    T lane[LANES];
  };
  static Block set(T x) {
    Block r;
    for (T& y : r.lane) y = x;
    return r;
  }
  static Block min(const Block& a, const Block& b) {
    Block r;
    for (int i = 0; i < LANES; ++i) r.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
    return r;
  }
  static void store(void* p, const Block& a) { std::memcpy(p, a.lane, sizeof(a.lane)); }
  template <int G>
  static Block transpose(const Block& x) {
    Block r;
    for (int j = 0; j < G; ++j)
      for (int l = 0; l < LANES / G; ++l) r.lane[j * (LANES / G) + l] = x.lane[l * G + j];
    return r;
  }
  template <int G>
  static Block broadcast(const T* c) {
    // In 16-byte stores: narrower ones would stall the vector loads that follow
    struct alignas(16) Sixteen {
      uint64_t half[2];
    } x;
    constexpr size_t span = G * sizeof(T);
    Block r;
    if constexpr (span == 4) {
      uint32_t y;
      std::memcpy(&y, c, 4);
      x.half[0] = x.half[1] = y * uint64_t{0x100000001};
    } else if constexpr (span == 8) {
      std::memcpy(&x.half[0], c, 8);
      x.half[1] = x.half[0];
    }
    if constexpr (span < 16) {
      for (size_t i = 0; i < sizeof(r.lane) / 16; ++i)
        std::memcpy(r.lane + i * (16 / sizeof(T)), &x, 16);
    } else {
      for (int i = 0; i < LANES; i += G) std::memcpy(r.lane + i, c, span);
    }
    return r;
  }
  static T lowest(const Block& x) { return *std::min_element(x.lane, x.lane + LANES); }
};

struct IntGeneric : Lanes<uint16_t, 32> {
  static uint16_t minus(uint16_t a, uint16_t b) { return static_cast<uint16_t>(a > b ? a - b : 0); }
  static Block sub(const Block& a, const Block& b) {
    Block r;
    for (int i = 0; i < 32; ++i) r.lane[i] = minus(a.lane[i], b.lane[i]);
    return r;
  }
  static Block quantize(const float* v, float scale) {
    Block r;
    for (int i = 0; i < 32; ++i) r.lane[i] = static_cast<uint16_t>(trellis::quantize(v[i], scale));
    return r;
  }
  template <int G>
  static void accumulate(Block& best, const int16_t* v, const Block& w, const uint16_t* c) {
    const Block cost = broadcast<G>(c);
    for (int i = 0; i < 32; ++i) {
      const int32_t d = static_cast<int16_t>(v[i] - w.lane[i]);
      const int32_t x = ((d * d + 0x4000) >> 15) + cost.lane[i];
      best.lane[i] = static_cast<uint16_t>(x < best.lane[i] ? x : best.lane[i]);
    }
  }
};

struct FloatGeneric : Lanes<float, 16> {
  static Block load(const float* p) {
    Block r;
    std::memcpy(r.lane, p, sizeof(r.lane));
    return r;
  }
  static Block sub(const Block& a, const Block& b) {
    Block r;
    for (int i = 0; i < 16; ++i) r.lane[i] = a.lane[i] - b.lane[i];
    return r;
  }
  static float multiply_add(float a, float b, float c) { return a * b + c; }
  static void accumulate(Block& best, const float* v, const Block& w, const Block& c) {
    for (int i = 0; i < 16; ++i) {
      const float d = v[i] - w.lane[i];
      const float x = multiply_add(d, d, c.lane[i]);
      best.lane[i] = x < best.lane[i] ? x : best.lane[i];
    }
  }
  static float highest_magnitude(const float* v, int count) {
    float high = 0;
    for (int i = 0; i < count; ++i) high = std::max(high, std::fabs(v[i]));
    return high;
  }
};

}  // namespace

void search_tile_generic(const float* target, const float* values, int tile_words, void* scratch,
                         uint16_t* states) {
  search_tile<IntGeneric, FloatGeneric>(target, values, tile_words, scratch, states);
}

}  // namespace trellis
