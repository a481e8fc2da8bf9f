// A column block times rows in integers, for whichever instruction set `V` wraps; included by one file
// for each.
//
// A weight becomes a 16-bit integer: mul1's byte sum, or the value of another codebook in units so fine
// that what is lost is a quarter of an op's bound. The activations of 128 inputs become 16-bit integers with
// one scale, chosen such that no sum of 128 products can overflow 32 bits. Those sums are then exact,
// whichever instructions find them and in whichever order; only sums of 128 inputs are rounded.
//
// Weights stay in the order of the stream: 32 of them, a strip, belong to two columns, c and c + 8, and the
// activations are laid out to match.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "../rates.h"
#include "codebook.h"
#include "layer.h"
#include "rows.h"

namespace trellis {
namespace {

constexpr int kStrips = 8;  // of a tile
constexpr int kStrip = 32;  // weights of a strip
constexpr int kDepth = 8;   // tiles, one above the other, that share a scale: 128 inputs

// Bit of the stream at which the state of weight `position` begins; below 0: before the tile's end.
constexpr int state_begin(int position, int words) { return (position + 1) * words / 16 - 16; }

// The input of a tile that belongs to each weight of a strip.
constexpr int input_of(int weight) {
  return (weight & 1) | (weight >> 3 & 3) << 1 | (weight >> 1 & 1) << 3;
}

// The units and the range of a codebook's integers; a weight is (integer + kOffset) * kScale.
struct HalvesRange {
  static constexpr float kLargest = 8192, kScale = 0x1p-11f, kOffset = 0;
};
struct ByteSumRange {
  static constexpr float kLargest = 1020, kScale = kMul1Scale, kOffset = kMul1Offset / kMul1Scale;
};
struct LookupRange {  // E4M3 values are exact, and no FP16 value reaches 6.5
  static constexpr float kLargest = 6656, kScale = 0x1p-10f, kOffset = 0;
};

// kOffset where integers are a quarter of finer ones and ties are rounded up: on average over all states
// they are too large, which many inputs of one sign would make felt.
constexpr float ties_up(int codebook) { return codebook == kInst3 ? -0.124f : -0.142f; }

// The activations of up to kDepth tiles of one row.
struct alignas(64) Inputs {
  int16_t words[kDepth][kStrip];
  float scale;  // of the integers
  float total;  // of the inputs that the integers stand for
};

inline int64_t input_blocks(const Matrix& w) { return (w.in_tiles + kDepth - 1) / kDepth; }

template <typename V>
void quantise(const Matrix& w, const float* x, int depth, float largest_weight, float largest_input,
              Inputs& to) {
  float largest, magnitude;
  V::magnitudes(x, depth, &largest, &magnitude);
  std::memset(to.words[depth], 0, sizeof(to.words[0]) * (kDepth - depth));
  if (!(magnitude <= 3e38f)) {  // one value that is not finite makes every result NaN
    std::memset(to.words, 0, sizeof(to.words));
    to.scale = to.total = magnitude - magnitude;
    return;
  }
  // Half a unit less for the rounding of each integer.
  const float room = 2147483000.0f / largest_weight - 8 * kDepth;
  float factor = 1.0f;
  if (largest > 0) {
    // The largest becomes an integer, so that nothing is lost where all are as large.
    const float integer = std::trunc(std::min(largest_input, room * (largest / magnitude)));
    factor = std::min(integer / largest, 0x1p120f);
  }
  int total = 0;
  V::round(w.tile_words, x, depth, factor, to.words, &total);
  to.scale = 1.0f / factor;
  to.total = static_cast<float>(total) * to.scale;
}

template <typename V, typename F>
void with_codebook(const Matrix& w, F f) {
  switch (w.codebook) {
    case kInst3:
      return f(typename V::template TwoHalves<kInst3>{});
    case kMcg:
      return f(typename V::template TwoHalves<kMcg>{});
    case kMul1:
      return f(typename V::ByteSum{});
    default:
      return f(typename V::Lookup{{}, w.values});
  }
}

// take(block, inputs) for each block of a row's inputs.
template <typename V, typename Take>
void quantise_row(const Matrix& w, const float* x, const Take& take) {
  with_codebook<V>(w, [&](const auto& codebook) {
    Inputs inputs;
    for (int64_t block = 0; block < input_blocks(w); ++block) {
      const int64_t in_tile = block * kDepth;
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
      quantise<V>(w, x + in_tile * 16, depth, codebook.kLargest, 32767, inputs);
      take(block, inputs);
    }
  });
}

inline float total_of(const Inputs* inputs, int64_t blocks) {
  float total = 0;
  for (int64_t block = 0; block < blocks; ++block) total += inputs[block].total;
  return total;
}

// Sums of integers become sums of weights.
template <typename Codebook>
void rescale(float total, float* sums) {
  const float offset = total * Codebook::kOffset;
  for (int c = 0; c < kSlabColumns; ++c) sums[c] = (sums[c] + offset) * Codebook::kScale;
}

// Tiles below one another lie far apart, which no hardware foresees: one soon needed, and one that the
// next kDepth tiles begin with. A fetch from beyond the matrix does nothing.
template <int kWords>
void prefetch(const int16_t* packed, int64_t stride) {
  const auto at = [&](int64_t tiles) {
    return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(packed) +
                                         static_cast<uintptr_t>(tiles * stride * 2));
  };
  for (int byte = 0; byte < 2 * kWords; byte += 64) {
    __builtin_prefetch(at(3) + byte, 0, 3);
    __builtin_prefetch(at(kDepth) + byte, 0, 2);
  }
}

// What V::Layout<kWords> is: which weights of a tile share a vector, which vectors share a sum, and which
// activations they meet. Here: a strip, in as many parts as it takes vectors, is a sum.
template <typename V, int kWords>
struct Strips {
  static constexpr int kSums = kStrips, kParts = kStrip / V::kLanes, kRowsAtOnce = V::kRowsAtOnce;

  template <int kVector>
  static typename V::Words states(const int16_t* tile) {
    return V::template states<kWords, kVector>(tile);
  }
  static typename V::Words inputs(const int16_t* words, int part) {
    return V::load(words + part * V::kLanes);
  }
  static void add_columns(const typename V::Lanes (&sums)[kSums], float scale, float* to) {
    V::add_columns(sums, scale, to);
  }
};

template <typename V>
struct Slab {
  static constexpr int kRowBlock = trellis::kRowBlock, kColumnBlocks = 1, kFewRows = 0;
  static constexpr int kVectors = kStrips * kStrip / V::kLanes;  // of a tile
  using Lanes = typename V::Lanes;
  using Vectors = std::make_integer_sequence<int, kVectors>;

  template <int kRows, int kSums>
  static void clear(Lanes (&lanes)[kRows][kSums]) {
    for (auto& row : lanes)
      for (auto& sum : row) sum = V::zero();
  }

  template <typename Layout, int kRows>
  static void add(const Lanes (&lanes)[kRows][Layout::kSums], const Inputs* inputs, int64_t blocks,
                  float* sums) {
    for (int r = 0; r < kRows; ++r)
      Layout::add_columns(lanes[r], inputs[r * blocks].scale, sums + r * kSlabColumns);
  }

  // Decoded weights meet the rows at once and are never stored.
  template <int kWords, int kRows, typename Codebook, int... kVector>
  static void fused(const int16_t* packed, int64_t stride, int depth, const Codebook& codebook,
                    const Inputs* inputs, int64_t blocks, float* sums,
                    std::integer_sequence<int, kVector...>) {
    using Layout = typename V::template Layout<kWords>;
    Lanes lanes[kRows][Layout::kSums];
    clear(lanes);
    for (int k = 0; k < depth; ++k, packed += stride) {
      prefetch<kWords>(packed, stride);
      const auto meet = [&](int vector, const auto& weights) {
        for (int r = 0; r < kRows; ++r)
          V::dot(lanes[r][vector / Layout::kParts], weights,
                 Layout::inputs(inputs[r * blocks].words[k], vector % Layout::kParts));
      };
      (meet(kVector, codebook.value(Layout::template states<kVector>(packed))), ...);
    }
    add<Layout>(lanes, inputs, blocks, sums);
  }

  template <int kWords, typename Codebook, int... kVector>
  static void decode(const int16_t* packed, int64_t stride, int depth, const Codebook& codebook,
                     int16_t* weights, std::integer_sequence<int, kVector...>) {
    using Layout = typename V::template Layout<kWords>;
    for (int k = 0; k < depth; ++k, packed += stride, weights += kStrips * kStrip) {
      prefetch<kWords>(packed, stride);
      (V::store(weights + kVector * V::kLanes,
                codebook.value(Layout::template states<kVector>(packed))),
       ...);
    }
  }

  // Stored weights, [depth][kVectors], meet kRows rows.
  template <typename Layout, int kRows>
  static void meet(const int16_t* weights, int depth, const Inputs* inputs, int64_t blocks,
                   float* sums) {
    Lanes lanes[kRows][Layout::kSums];
    clear(lanes);
    for (int k = 0; k < depth; ++k, weights += kStrips * kStrip) {
      for (int part = 0; part < Layout::kParts; ++part) {
        for (int s = 0; s < Layout::kSums; ++s) {
          const auto from = V::load(weights + (s * Layout::kParts + part) * V::kLanes);
          for (int r = 0; r < kRows; ++r)
            V::dot(lanes[r][s], from, Layout::inputs(inputs[r * blocks].words[k], part));
        }
      }
    }
    add<Layout>(lanes, inputs, blocks, sums);
  }

  template <typename Layout, int kRows>
  static int meet_while(const int16_t* weights, int depth, const Inputs* inputs, int64_t blocks,
                        int row, int rows, float* sums) {
    for (; row + kRows <= rows; row += kRows)
      meet<Layout, kRows>(weights, depth, inputs + row * blocks, blocks, sums + row * kSlabColumns);
    return row;
  }

  template <int kWords, typename Codebook>
  static void accumulate(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                         const Inputs* inputs, int rows, float* sums) {
    using Layout = typename V::template Layout<kWords>;
    alignas(64) int16_t weights[kDepth * kStrips * kStrip];
    const int64_t stride = w.out_tiles * kWords, blocks = input_blocks(w);
    for (int64_t block = 0; block < blocks; ++block, ++inputs) {
      const int64_t in_tile = block * kDepth;
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
      const int16_t* packed = w.trellis + in_tile * stride + out_tile * kWords;
      for (int t = 0; t < tiles; ++t, packed += kWords) {
        float* const to = sums + t * 16;
        if (rows == 1) {
          fused<kWords, 1>(packed, stride, depth, codebook, inputs, blocks, to, Vectors{});
        } else if (rows == 2 && Layout::kRowsAtOnce >= 2) {
          fused<kWords, 2>(packed, stride, depth, codebook, inputs, blocks, to, Vectors{});
        } else {
          decode<kWords>(packed, stride, depth, codebook, weights, Vectors{});
          constexpr int kMost = Layout::kRowsAtOnce;
          int row = meet_while<Layout, kMost>(weights, depth, inputs, blocks, 0, rows, to);
          if (kMost > 2) row = meet_while<Layout, 2>(weights, depth, inputs, blocks, row, rows, to);
          meet_while<Layout, 1>(weights, depth, inputs, blocks, row, rows, to);
        }
      }
    }
  }

  static int64_t prepared_bytes(const Matrix& w, int rows) {
    return rows * input_blocks(w) * static_cast<int64_t>(sizeof(Inputs));
  }

  static void prepare(const Matrix& w, const float* x, int row, int, void* prepared) {
    Inputs* const inputs = static_cast<Inputs*>(prepared) + row * input_blocks(w);
    quantise_row<V>(w, x, [&](int64_t block, const Inputs& of) { inputs[block] = of; });
  }

  static void multiply(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                       const Take& take) {
    alignas(64) static thread_local float sums[kRowBlock * kSlabColumns];
    const Inputs* const inputs = static_cast<const Inputs*>(prepared);
    std::memset(sums, 0, sizeof(float) * rows * kSlabColumns);
    with_codebook<V>(w, [&](const auto& codebook) {
      with_rate(w.tile_words, [&](auto words) {
        accumulate<words.value>(w, codebook, out_tile, tiles, inputs, rows, sums);
      });
      const int64_t blocks = input_blocks(w);
      for (int r = 0; r < rows; ++r) {
        const float total = total_of(inputs + r * blocks, blocks);
        rescale<std::decay_t<decltype(codebook)>>(total, sums + r * kSlabColumns);
      }
    });
    take(0, 0, rows, sums);
  }
};

// Both steps at once, for callers that share no rotated rows between column blocks.
template <typename Kernel>
void product(const Matrix& w, int64_t out_tile, int tiles, const float* x, int64_t x_stride,
             int rows, float* sums) {
  static thread_local std::vector<Inputs> prepared;
  const size_t bytes = static_cast<size_t>(Kernel::prepared_bytes(w, rows));
  if (prepared.size() * sizeof(Inputs) < bytes) prepared.resize(bytes / sizeof(Inputs) + 1);
  for (int r = 0; r < rows; ++r) Kernel::prepare(w, x + r * x_stride, r, rows, prepared.data());
  const auto take = [&](int, int row, int count, const float* from) {
    std::memcpy(sums + row * kSlabColumns, from, sizeof(float) * count * kSlabColumns);
  };
  Kernel::multiply(w, out_tile, tiles, prepared.data(), rows, take);
}

template <typename Kernel>
SlabKernels integer_kernels(const char* name) {
  return {name,
          generic_slab_kernels().decode,
          product<Kernel>,
          Kernel::kRowBlock,
          Kernel::kColumnBlocks,
          Kernel::kFewRows,
          Kernel::prepared_bytes,
          Kernel::prepare,
          Kernel::multiply,
          rotate,
          finish,
          write};
}

}  // namespace
}  // namespace trellis
