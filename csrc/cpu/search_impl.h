// The trellis search, written once and compiled for each instruction set.
//
// Idea. Between two neighbouring positions lies an edge, the bits their states share. A state is
// (a | m | l): incoming edge (a, m), outgoing edge (m, l). One step of the dynamic programme is
//     new[m, l] = min over a of  old[a, m] + (value[a, m, l] - target)^2,
// 65,536 candidates at any rate. No back pointers: the costs of every step are kept, and the argmin
// is taken again, for one edge a step, when the path is read off backwards.
//
// Closing the path. The search starts free a little before the seam (`search_window`) and goes
// once round to the seam. Survivors merge on the way back, so whatever edge a path ends in, it
// came through the same edge at the seam nearly always; the path that ends in that edge is closed
// and, given it, the best. When they have not merged (2 % of the tiles at 4 bits, 10 % at 2), a
// second round is forced to start and end there. That is 256 + window steps instead of the usual
// 256 + 2 windows or more.
//
// Cost model. Only the candidates count: 65,536 x (256 + window). Pruning does not pay: targets
// in the tails have few good values, so a path 20 mean step errors behind the best often still
// wins; a threshold that loses 1 % MSE keeps 40 % of the edges at 4 bits and even more at 6, too
// dense for a list. So the search is exhaustive and the arithmetic cheap: at up to 4 bits costs
// are 16-bit integers, 32 lanes in a 512-bit register, four instructions (subtract, rounding high
// multiply, saturating add, minimum). The mean step error is then 7 units or more and rounding
// costs 0.04 % MSE. From 5 bits on it would be 2 units or less, so: float32, subtract, fma,
// minimum.
//
// Layout. Lanes hold (l, j) with j fastest, j counting G neighbouring m: the old costs of a block
// are then G contiguous elements repeated, a broadcasting load, and shuffles are needed per
// finished block, not per candidate. The values are copied into that order first (2 % of the
// time), so that a step reads them as one stream, from the second-level cache.
//
// Reproducibility. The integer search gives the same states on every instruction set. The float
// search rounds once per candidate with fma and twice without, so there the generic build may
// choose another of two paths that are equal but for rounding.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "search_common.h"

namespace trellis {
namespace {

// Round to nearest even without a library call; |x| < 2^21.
inline int16_t quantize(float x, float scale) {
  const float biased = x * scale + 12582912.0f;  // 1.5 * 2^23: the integer ends up in the low bits
  int32_t bits;
  std::memcpy(&bits, &biased, sizeof(bits));
  return static_cast<int16_t>(bits);
}

// Integer search: targets and values in units of 1 / scale, costs in units of 2^15 / scale^2.
template <class V>
struct IntSearch {
  using Cost = uint16_t;
  using Value = int16_t;
  float scale;

  static Cost unreachable() { return 0xFFFF; }

  // Copies the codebook into the order in which `step` reads it.
  template <int AB, int LB>
  void prepare(const float* values, Value* out) const {
    constexpr int A = 1 << AB, MB = 16 - AB - LB, G = 32 >> LB;
    for (int g = 0; g < (1 << MB) / G; ++g)
      for (int a = 0; a < A; ++a, out += 32)
        V::store(out, V::template transpose<1 << LB>(
                          V::quantize(values + (((a << MB) + g * G) << LB), scale)));
  }

  // `base` is the lowest old cost; subtracting it keeps costs in range. Returns the lowest new one.
  template <int AB, int LB>
  Cost step(const Value* values, const Cost* from, Cost* to, float target, Cost base) const {
    constexpr int A = 1 << AB, MB = 16 - AB - LB, G = 32 >> LB;
    const auto w = V::set(static_cast<uint16_t>(quantize(target, scale)));
    const auto b = V::set(base);
    auto low = V::set(unreachable());
    for (int g = 0; g < (1 << MB) / G; ++g) {
      auto best = V::set(unreachable());
#pragma GCC unroll 16
      for (int a = 0; a < A; ++a, values += 32)
        V::template accumulate<G>(best, values, w, from + (a << MB) + g * G);
      best = V::sub(V::template transpose<G>(best), b);
      low = V::min(low, best);
      V::store(to + g * 32, best);
    }
    return V::lowest(low);
  }

  int candidate(Cost c, float value, float target) const {
    const int d = static_cast<int16_t>(quantize(value, scale) - quantize(target, scale));
    return std::min(c + ((d * d + 0x4000) >> 15), 0xFFFF);
  }
};

template <class V>
struct FloatSearch {
  using Cost = float;
  using Value = float;

  static Cost unreachable() { return std::numeric_limits<float>::infinity(); }

  // G neighbouring m share a block of 16 lanes, or one m has several blocks, N of them in registers
  template <int LB>
  struct Shape {
    static constexpr int G = LB < 4 ? 16 >> LB : 1;
    static constexpr int BLOCKS = LB < 4 ? 1 : 1 << (LB - 4);
    static constexpr int N = BLOCKS < 4 ? BLOCKS : 4;
  };

  template <int AB, int LB>
  void prepare(const float* values, Value* out) const {
    constexpr int A = 1 << AB, MB = 16 - AB - LB, G = Shape<LB>::G, N = Shape<LB>::N;
    for (int g = 0; g < (1 << MB) / G; ++g)
      for (int b = 0; b < Shape<LB>::BLOCKS; b += N)
        for (int a = 0; a < A; ++a)
          for (int n = 0; n < N; ++n, out += 16)
            V::store(out, V::template transpose<16 / G>(
                              V::load(values + (((a << MB) + g * G) << LB) + (b + n) * 16)));
  }

  template <int AB, int LB>
  Cost step(const Value* values, const Cost* from, Cost* to, float target, Cost base) const {
    constexpr int A = 1 << AB, MB = 16 - AB - LB, G = Shape<LB>::G, N = Shape<LB>::N;
    const auto w = V::set(target);
    const auto lowest_old = V::set(base);
    auto low = V::set(unreachable());
    for (int g = 0; g < (1 << MB) / G; ++g) {
      for (int b = 0; b < Shape<LB>::BLOCKS; b += N) {
        typename V::Block best[N];
        for (int n = 0; n < N; ++n) best[n] = V::set(unreachable());
#pragma GCC unroll 4
        for (int a = 0; a < A; ++a) {
          const auto c = V::template broadcast<G>(from + (a << MB) + g * G);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n, values += 16) V::accumulate(best[n], values, w, c);
        }
        for (int n = 0; n < N; ++n, to += 16) {
          const auto x = V::sub(V::template transpose<G>(best[n]), lowest_old);
          low = V::min(low, x);
          V::store(to, x);
        }
      }
    }
    return V::lowest(low);
  }

  float candidate(Cost c, float value, float target) const {
    const float d = value - target;
    return V::multiply_add(d, d, c);
  }
};

// W0, W1: bits of even and odd positions.
template <class Search, int W0, int W1>
class TileSearch {
  using Cost = typename Search::Cost;
  using Value = typename Search::Value;
  static constexpr int kRow = 65536 >> (W0 < W1 ? W0 : W1);

 public:
  TileSearch(const Search& search, const float* target, const float* values, void* scratch)
      : search_(search),
        target_(target),
        codebook_(values),
        values_(static_cast<Value*>(scratch)),
        rows_(reinterpret_cast<Cost*>(values_ + (W0 == W1 ? 1 : 2) * 65536)) {
    search_.template prepare<W1, W0>(values, values_);
    if (W0 != W1) search_.template prepare<W0, W1>(values, values_ + 65536);
  }

  // False if the path found does not close: only a forced round whose 16-bit costs saturated, which
  // makes edges that cannot be reached look as good as the others.
  bool run(uint16_t* states) {
    constexpr int lead = search_window(W0 + W1), last = lead + 256;
    std::fill_n(rows_, 65536 >> W0, Cost{0});
    forward(256 - lead, last);
    int edge = static_cast<int>(std::min_element(row(last), row(last) + (65536 >> W0)) - row(last));
    for (int attempt = 0; attempt < 3; ++attempt) {
      const int start = backward(256 - lead, lead, last, edge, states);
      if (start == edge) return true;
      edge = start;
    }
    std::fill_n(rows_, 65536 >> W0, Search::unreachable());
    rows_[edge] = 0;
    forward(0, 256);
    return backward(0, 0, 256, edge, states) == edge;
  }

 private:
  Cost* row(int i) { return rows_ + static_cast<size_t>(i) * kRow; }

  void forward(int first, int count) {
    Cost base = 0;
    for (int i = 0; i < count; i += 2) {
      const float* w = target_ + ((first + i) & 255);
      base = search_.template step<W1, W0>(values_, row(i), row(i + 1), w[0], base);
      base = search_.template step<W0, W1>(values_ + (W0 == W1 ? 0 : 65536), row(i + 1), row(i + 2),
                                           w[1], base);
    }
  }

  // Step i codes position first + i. Follows the best path from `edge` after step `end` - 1 back to
  // the edge before step `begin`, the smallest `a` winning ties.
  int backward(int first, int begin, int end, int edge, uint16_t* states) {
    for (int i = end - 1; i >= begin; --i) {
      const int p = (first + i) & 255;
      const int width = p & 1 ? W1 : W0, next = p & 1 ? W0 : W1;
      const Cost* from = row(i);
      int state = edge;
      auto best = search_.candidate(from[edge >> width], codebook_[edge], target_[p]);
      for (int a = 1; a < 1 << next; ++a) {
        const int s = (a << (16 - next)) | edge;
        const auto x = search_.candidate(from[s >> width], codebook_[s], target_[p]);
        if (x < best) best = x, state = s;
      }
      states[p] = static_cast<uint16_t>(state);
      edge = state >> width;
    }
    return edge;
  }

  const Search& search_;
  const float* target_;
  const float* codebook_;
  Value* values_;
  Cost* rows_;
};

template <class VI, class VF, int W0, int W1>
void search_rate(const float* target, const float* values, void* scratch, uint16_t* states) {
  alignas(64) float w[256];
  const float highest = VF::highest_magnitude(values, 65536);
  float peak = 0;
  for (int p = 0; p < 256; ++p) {
    // Far outside the codebook only the sign of the target matters; the bound keeps sums finite
    const float bound = highest * 1024;
    w[p] = target[p] != target[p] ? 0.0f : std::min(std::max(target[p], -bound), bound);
    peak = std::max(peak, std::fabs(w[p]));
  }
  if constexpr (W0 <= 4 && W1 <= 4) {
    // Differences may reach (1 + kReach) * highest and are kept modulo 2^16: with this range the
    // wrapped ones still look like (2 * kRange - 1 - kReach) * highest, far from a good match
    if (peak <= kReach * highest && highest > 1e-20f && highest < 1e20f) {
      const IntSearch<VI> search{32767.0f / (kRange * highest)};
      if (TileSearch<IntSearch<VI>, W0, W1>(search, w, values, scratch).run(states)) return;
    }
  }
  const FloatSearch<VF> search;
  if (!TileSearch<FloatSearch<VF>, W0, W1>(search, w, values, scratch).run(states)) {
    // Only for a codebook with NaNs; all zeros close at any rate
    std::memset(states, 0, 256 * sizeof(*states));
  }
}

template <class VI, class VF>
void search_tile(const float* target, const float* values, int tile_words, void* scratch,
                 uint16_t* states) {
  switch (tile_words) {
    case 16:
      return search_rate<VI, VF, 1, 1>(target, values, scratch, states);
    case 24:
      return search_rate<VI, VF, 1, 2>(target, values, scratch, states);
    case 32:
      return search_rate<VI, VF, 2, 2>(target, values, scratch, states);
    case 40:
      return search_rate<VI, VF, 2, 3>(target, values, scratch, states);
    case 48:
      return search_rate<VI, VF, 3, 3>(target, values, scratch, states);
    case 56:
      return search_rate<VI, VF, 3, 4>(target, values, scratch, states);
    case 64:
      return search_rate<VI, VF, 4, 4>(target, values, scratch, states);
    case 80:
      return search_rate<VI, VF, 5, 5>(target, values, scratch, states);
    case 96:
      return search_rate<VI, VF, 6, 6>(target, values, scratch, states);
    case 112:
      return search_rate<VI, VF, 7, 7>(target, values, scratch, states);
    case 128:
      return search_rate<VI, VF, 8, 8>(target, values, scratch, states);
  }
}

}  // namespace
}  // namespace trellis
