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
    for (int i = 0; i < LANES; ++i) r.lane[i] = x.lane[i % (LANES / G) * G + i / (LANES / G)];
    return r;
  }
  template <int G>
  static Block broadcast(const T* c) {
    Block r;
    for (int i = 0; i < LANES; i += G) std::memcpy(r.lane + i, c, G * sizeof(T));
    return r;
  }
  static T lowest(const Block& x) { return *std::min_element(x.lane, x.lane + LANES); }
};

struct IntGeneric : Lanes<uint16_t, 32> {
  static Block sub(const Block& a, const Block& b) {
    Block r;
    for (int i = 0; i < 32; ++i)
      r.lane[i] = static_cast<uint16_t>(a.lane[i] > b.lane[i] ? a.lane[i] - b.lane[i] : 0);
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
