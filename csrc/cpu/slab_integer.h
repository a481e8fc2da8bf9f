// A column block times rows in integers, for whichever instruction set `V` wraps; included by one file
// for each.
//
// A weight becomes a 16-bit integer: mul1's byte sum, or the value of another codebook in units so fine
// that what is lost is a tenth of an op's bound. The activations of 256 inputs become 16-bit integers
// with one scale. Products and their sums are then exact, and only sums of 256 inputs are rounded.
//
// Weights stay in the order of the stream: 32 of them, a strip, belong to two columns, c and c + 8, and the
// activations are laid out to match. Each strip of a tile has lanes of sums of its own, which are added at
// the end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#include "../rates.h"
#include "codebook.h"
#include "layer.h"
#include "rows.h"

namespace trellis {
namespace {

constexpr int kStrips = 8;  // of a tile
constexpr int kStrip = 32;  // weights of a strip
constexpr int kDepth = 16;  // tiles, one above the other, that share a scale

// Bit of the stream at which the state of weight `position` begins; below 0: before the tile's end.
constexpr int state_begin(int position, int words) { return (position + 1) * words / 16 - 16; }

// The input of a tile that belongs to each weight of a strip.
constexpr int input_of(int weight) {
  return (weight & 1) | (weight >> 3 & 3) << 1 | (weight >> 1 & 1) << 3;
}

// The activations of up to kDepth tiles of one row.
struct Inputs {
  alignas(64) int16_t words[kDepth][kStrip];
  float scale;  // of the integers

  // No lane of sums may overflow. It adds the inputs 2 a and 2 a + 1 of each tile, so their absolute sum
  // decides, beside the largest.
  template <typename V>
  void set(const float* x, int depth, float largest_weight) {
    float largest = 0, sums[8] = {};
    V::magnitudes(x, depth, &largest, sums);
    float most = 0, total = 0;
    for (float sum : sums) {
      most = std::max(most, sum);
      total += sum;
    }
    if (!(total <= 3e38f)) {  // one value that is not finite makes every result NaN
      std::memset(words, 0, sizeof(words));
      scale = total - total;
      return;
    }
    // Half a unit for the rounding of each of up to 2 * kDepth integers.
    const float room = 2147483000.0f / largest_weight - kDepth;
    const float factor =
        largest > 0 ? std::min(std::min(32767.0f / largest, room / most), 0x1p120f) : 1.0f;
    for (int k = 0; k < depth; ++k) V::quantise(x + k * 16, factor, words[k]);
    scale = 1.0f / factor;
  }
};

template <typename V>
struct Slab {
  static constexpr int kParts = kStrip / V::kLanes;  // vectors of a strip
  static constexpr int kSums = V::kSums;             // floats that a strip's sums take
  static constexpr int kTileSums = kStrips * kSums;
  static constexpr int kRowSums = 8 * kTileSums;
  using Words = typename V::Words;
  using Lanes = typename V::Lanes;

  template <int kRows>
  static void flush(Lanes (&lanes)[kRows][kStrips], const Inputs* inputs, float* sums) {
    for (int r = 0; r < kRows; ++r)
      for (int strip = 0; strip < kStrips; ++strip)
        V::add_scaled(lanes[r][strip], inputs[r].scale, sums + r * kRowSums + strip * kSums);
  }

  // Tiles below one another lie far apart, which no hardware foresees: one soon needed, and one that the
  // next kDepth tiles begin with. A fetch from beyond the matrix does nothing.
  template <int kWords>
  static void prefetch(const int16_t* packed, int64_t stride) {
    const auto at = [&](int64_t tiles) {
      return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(packed) +
                                           static_cast<uintptr_t>(tiles * stride * 2));
    };
    for (int byte = 0; byte < 2 * kWords; byte += 64) {
      __builtin_prefetch(at(3) + byte, 0, 3);
      __builtin_prefetch(at(kDepth) + byte, 0, 2);
    }
  }

  // Decoded weights meet the rows at once and are never stored.
  template <int kWords, int kRows, typename Codebook, int... kVector>
  static void fused(const int16_t* packed, int64_t stride, int depth, const Codebook& codebook,
                    const Inputs* inputs, float* sums, std::integer_sequence<int, kVector...>) {
    Lanes lanes[kRows][kStrips];
    for (auto& row : lanes)
      for (auto& strip : row) strip = V::zero();
    for (int k = 0; k < depth; ++k, packed += stride) {
      prefetch<kWords>(packed, stride);
      const auto meet = [&](int vector, Words weights) {
        for (int r = 0; r < kRows; ++r)
          V::dot(lanes[r][vector / kParts], weights,
                 V::load(inputs[r].words[k] + vector % kParts * V::kLanes));
      };
      (meet(kVector, codebook.value(V::template states<kWords, kVector>(packed))), ...);
    }
    flush(lanes, inputs, sums);
  }

  template <int kWords, typename Codebook, int... kVector>
  static void decode(const int16_t* packed, const Codebook& codebook, int16_t* weights,
                     std::integer_sequence<int, kVector...>) {
    (V::store(weights + kVector * V::kLanes,
              codebook.value(V::template states<kWords, kVector>(packed))),
     ...);
  }

  // Stored weights, [depth][kStrips][kStrip], meet kRows rows.
  template <int kRows>
  static void multiply(const int16_t* weights, int depth, const Inputs* inputs, float* sums) {
    constexpr int kAtOnce = std::min(kStrips, V::kRegisterSums / kRows);
    for (int first = 0; first < kStrips; first += kAtOnce) {
      Lanes lanes[kRows][kAtOnce];
      for (auto& row : lanes)
        for (auto& strip : row) strip = V::zero();
      for (int k = 0; k < depth; ++k) {
        for (int part = 0; part < kParts; ++part) {
          const int at = part * V::kLanes;
          for (int s = 0; s < kAtOnce; ++s) {
            const Words from = V::load(weights + (k * kStrips + first + s) * kStrip + at);
            for (int r = 0; r < kRows; ++r)
              V::dot(lanes[r][s], from, V::load(inputs[r].words[k] + at));
          }
        }
      }
      for (int r = 0; r < kRows; ++r)
        for (int s = 0; s < kAtOnce; ++s)
          V::add_scaled(lanes[r][s], inputs[r].scale, sums + r * kRowSums + (first + s) * kSums);
    }
  }

  template <int kRows>
  static int passes(const int16_t* weights, int depth, const Inputs* inputs, int row, int rows,
                    float* sums) {
    for (; row + kRows <= rows; row += kRows)
      multiply<kRows>(weights, depth, inputs + row, sums + row * kRowSums);
    return row;
  }

  template <int kWords, typename Codebook>
  static void accumulate(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                         const float* x, int64_t x_stride, int rows, float* sums, float* totals) {
    static thread_local Inputs inputs[kRowBlock];
    alignas(64) int16_t weights[kDepth * kStrips * kStrip];
    constexpr auto kVectors = std::make_integer_sequence<int, kStrips * kParts>{};
    const int64_t stride = w.out_tiles * kWords;
    for (int64_t in_tile = 0; in_tile < w.in_tiles; in_tile += kDepth) {
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
      for (int r = 0; r < rows; ++r) {
        inputs[r].set<V>(x + r * x_stride + in_tile * 16, depth, Codebook::kLargest);
        if constexpr (Codebook::kOffset != 0) {
          Lanes total = V::zero();
          for (int k = 0; k < depth; ++k)
            for (int part = 0; part < kParts; ++part)
              V::dot(total, V::ones(), V::load(inputs[r].words[k] + part * V::kLanes));
          V::add_scaled(total, inputs[r].scale, totals + r * kSums);
        }
      }
      const int16_t* packed = w.trellis + (in_tile * w.out_tiles + out_tile) * kWords;
      for (int t = 0; t < tiles; ++t, packed += kWords) {
        float* const to = sums + t * kTileSums;
        if (rows == 1) {
          fused<kWords, 1>(packed, stride, depth, codebook, inputs, to, kVectors);
        } else if (rows == 2 && V::kRegisterSums >= 2 * kStrips) {
          fused<kWords, 2>(packed, stride, depth, codebook, inputs, to, kVectors);
        } else {
          for (int k = 0; k < depth; ++k) {
            prefetch<kWords>(packed + k * stride, stride);
            decode<kWords>(packed + k * stride, codebook, weights + k * kStrips * kStrip, kVectors);
          }
          int row = passes<4>(weights, depth, inputs, 0, rows, to);
          row = passes<2>(weights, depth, inputs, row, rows, to);
          passes<1>(weights, depth, inputs, row, rows, to);
        }
      }
    }
  }

  // The lanes of each strip become its two columns.
  template <typename Codebook>
  static void reduce(const float* lanes, const float* totals, float* sums) {
    float offset = 0;
    if constexpr (Codebook::kOffset != 0)
      for (int lane = 0; lane < kSums; ++lane) offset += V::column(lane) == 0 ? totals[lane] : 0;
    offset *= Codebook::kOffset;
    for (int t = 0; t < 8; ++t) {
      for (int strip = 0; strip < kStrips; ++strip, lanes += kSums) {
        float column[2] = {};
        for (int lane = 0; lane < kSums; ++lane) column[V::column(lane)] += lanes[lane];
        for (int i = 0; i < 2; ++i)
          sums[t * 16 + strip + 8 * i] = column[i] * Codebook::kScale + offset;
      }
    }
  }

  template <typename Codebook>
  static void product_of(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                         const float* x, int64_t x_stride, int rows, float* sums) {
    alignas(64) static thread_local float lanes[kRowBlock * kRowSums], totals[kRowBlock * kSums];
    std::memset(lanes, 0, sizeof(float) * rows * kRowSums);
    std::memset(totals, 0, sizeof(float) * rows * kSums);
    with_rate(w.tile_words, [&](auto words) {
      accumulate<words.value>(w, codebook, out_tile, tiles, x, x_stride, rows, lanes, totals);
    });
    for (int r = 0; r < rows; ++r)
      reduce<Codebook>(lanes + r * kRowSums, totals + r * kSums, sums + r * kSlabColumns);
  }

  static void product(const Matrix& w, int64_t out_tile, int tiles, const float* x,
                      int64_t x_stride, int rows, float* sums) {
    const auto with = [&](const auto& codebook) {
      product_of(w, codebook, out_tile, tiles, x, x_stride, rows, sums);
    };
    switch (w.codebook) {
      case kInst3:
        return with(typename V::template TwoHalves<kInst3>{});
      case kMcg:
        return with(typename V::template TwoHalves<kMcg>{});
      case kMul1:
        return with(typename V::ByteSum{});
      default:
        return with(typename V::Lookup{w.values});
    }
  }
};

}  // namespace
}  // namespace trellis
