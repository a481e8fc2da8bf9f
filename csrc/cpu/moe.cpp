// Routes are sorted by expert, so that an expert's matrices are decoded once for all its rows (of a
// chunk), and every step runs over all experts at once, which keeps all threads busy when each
// expert has a row or two.
#include "moe.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "../parallel.h"
#include "codebook.h"

namespace trellis {
namespace {

// Routes whose results are kept until their tokens are summed.
constexpr int64_t kChunkRoutes = 8192;
// Routes that go through the projections together.
constexpr int64_t kStageRoutes = 1024;

// Rows of one expert that share one decoding.
struct Block {
  int32_t expert, first, count;  // `first` counts from the stage's first route
};

// Hands out pieces of the workspace, each on a cache line of its own; with no memory it only counts.
class Arena {
 public:
  explicit Arena(void* memory) : start_(reinterpret_cast<uintptr_t>(memory)) {
    if (memory != nullptr) used_ = (64 - start_ % 64) % 64;
  }

  template <typename T>
  T* take(int64_t count) {
    T* const piece = reinterpret_cast<T*>(start_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return piece;
  }

  int64_t used() const { return static_cast<int64_t>(used_); }

 private:
  uintptr_t start_;
  uintptr_t used_ = 0;
};

struct Scratch {
  int64_t chunk_tokens;
  int32_t* order;     // routes of the chunk (token * top_k + slot), sorted by expert
  int32_t* position;  // where a route is in that order; -1: it contributes nothing
  int32_t* starts;    // where an expert's routes start in that order
  Block* blocks;
  float *gate_rows, *up_rows;  // rotated; up's are down's later
  float *gate_scales, *up_scales;
  float *gate, *up;
  float* results;

  Scratch(Arena& arena, int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
          int64_t inner) {
    const int64_t routes = std::min(tokens * top_k, std::max(kChunkRoutes, top_k));
    const int64_t stage = std::min(routes, kStageRoutes);
    chunk_tokens = routes / top_k;
    order = arena.take<int32_t>(routes);
    position = arena.take<int32_t>(routes);
    starts = arena.take<int32_t>(experts + 1);
    blocks = arena.take<Block>(stage);
    gate_rows = arena.take<float>(stage * hidden);
    up_rows = arena.take<float>(stage * std::max(hidden, inner));
    gate_scales = arena.take<float>(stage);
    up_scales = arena.take<float>(stage);
    gate = arena.take<float>(stage * inner);
    up = arena.take<float>(stage * inner);
    results = arena.take<float>(routes * hidden);
  }
};

const char* const kProjectionNames[] = {"gate", "up", "down"};

bool has_rate(int codebook, int64_t words) {
  if (words == 24 || words == 40 || words == 56) return codebook == kMul1;
  if (words % 16 != 0 || words < 16 || words > 128) return false;
  if (codebook == kSqgE4m3) return words >= 32 && words <= 96;
  return codebook != kSqgFp16 || words == 80 || words == 96;
}

class Experts {
 public:
  Experts(Isa isa, const Moe& m, void* workspace)
      : kernels_{&exact_slab_kernels(isa, m.gate.codebook), &exact_slab_kernels(isa, m.up.codebook),
                 &slab_kernels(isa)},
        m_(m),
        s_(scratch(m, workspace)),
        gated_(m.gate.suh.data != nullptr),
        one_rotation_(one_rotation(m)) {}

  void run() {
    for (int64_t token = 0; token < m_.tokens; token += s_.chunk_tokens) {
      const int64_t tokens = std::min(s_.chunk_tokens, m_.tokens - token);
      const int64_t routes = sort(token, tokens);
      for (int64_t first = 0; first < routes; first += kStageRoutes)
        stage(token, first, std::min(kStageRoutes, routes - first));
      reduce(token, tokens);
    }
  }

 private:
  static Scratch scratch(const Moe& m, void* workspace) {
    Arena arena(workspace);
    return Scratch(arena, m.tokens, m.top_k, m.experts, m.hidden, m.inner);
  }

  const int64_t* entry(int projection, int64_t expert, int64_t slice) const {
    return m_.table + ((projection * m_.experts + expert) * m_.slices + slice) * 2;
  }

  // -1: no such expert here.
  int64_t expert_of(int64_t route) const {
    const int64_t id = m_.wide_ids ? static_cast<const int64_t*>(m_.ids)[route]
                                   : static_cast<const int32_t*>(m_.ids)[route];
    if (id < 0 || id >= m_.experts) return -1;
    for (int64_t slice = 0; slice < m_.slices; ++slice)
      if (entry(2, id, slice)[1] == 0) return -1;
    return id;
  }

  // Counting sort of the chunk's routes by expert; returns how many contribute.
  int64_t sort(int64_t token, int64_t tokens) {
    const int64_t routes = tokens * m_.top_k;
    std::fill(s_.starts, s_.starts + m_.experts + 1, 0);
    for (int64_t i = 0; i < routes; ++i) {
      const int64_t expert = expert_of(token * m_.top_k + i);
      s_.position[i] = static_cast<int32_t>(expert);
      if (expert >= 0) ++s_.starts[expert + 1];
    }
    for (int64_t e = 0; e < m_.experts; ++e) {
      if (s_.starts[e + 1] > 0) check(e);
      s_.starts[e + 1] += s_.starts[e];
    }
    const int64_t sorted = s_.starts[m_.experts];
    for (int64_t i = 0; i < routes; ++i) {
      if (s_.position[i] < 0) continue;
      const int32_t at = s_.starts[s_.position[i]]++;
      s_.order[at] = static_cast<int32_t>(i);
      s_.position[i] = at;
    }
    return sorted;
  }

  void check(int64_t expert) const {
    for (int p = gated_ ? 0 : 1; p < 3; ++p) {
      for (int64_t slice = 0; slice < m_.slices; ++slice) {
        const int64_t offset = entry(p, expert, slice)[0], words = entry(p, expert, slice)[1];
        const int64_t tiles = (m_.hidden / 16) * (m_.inner / 16);
        const int codebook = (p == 0 ? m_.gate : p == 1 ? m_.up : m_.down).codebook;
        if (has_rate(codebook, words) && offset >= 0 && offset <= m_.packed_words - tiles * words)
          continue;
        throw std::runtime_error(
            "rank_sliced_moe: table has (" + std::to_string(offset) + ", " + std::to_string(words) +
            ") for " + kProjectionNames[p] + " of expert " + std::to_string(expert) + ", rank " +
            std::to_string(slice) + ", expected a rate of its codebook, and a matrix within the " +
            std::to_string(m_.packed_words) + " words of packed");
      }
    }
  }

  Matrix matrix(int projection, int64_t expert, int64_t slice) const {
    const Projection& p = projection == 0 ? m_.gate : projection == 1 ? m_.up : m_.down;
    const int64_t* const where = entry(projection, expert, slice);
    const int64_t v = expert * m_.slices + slice;
    Matrix w;
    w.trellis = m_.packed + where[0];
    w.in_tiles = (projection == 2 ? m_.inner : m_.hidden) / 16;
    w.out_tiles = (projection == 2 ? m_.hidden : m_.inner) / 16;
    w.tile_words = static_cast<int>(where[1]);
    w.codebook = p.codebook;
    w.values = codebook_values(p.codebook, w.tile_words / 16);
    w.suh = static_cast<const uint16_t*>(p.suh.data) + v % p.suh.rows * p.suh.columns;
    w.svh = static_cast<const uint16_t*>(p.svh.data) + v % p.svh.rows * p.svh.columns;
    return w;
  }

  // The projections for sorted routes [first, first + count) of the chunk.
  void stage(int64_t token, int64_t first, int64_t count) {
    const int64_t blocks = cut(token, first, count);
    for (int64_t slice = 0; slice < m_.slices; ++slice) {
      const auto each_row = [&](const auto& body) {
        parallel_for(blocks, 1, [&](int64_t begin, int64_t end) {
          for (int64_t b = begin; b < end; ++b)
            for (int64_t i = 0; i < s_.blocks[b].count; ++i)
              body(s_.blocks[b].expert, s_.blocks[b].first + i);
        });
      };
      const Rows x{m_.x, m_.x_dtype, m_.tokens, m_.columns};
      each_row([&](int64_t expert, int64_t i) {
        const int64_t row = token + s_.order[first + i] / m_.top_k;
        rotate_row(matrix(1, expert, slice), x, row, s_.up_rows + i * m_.hidden, s_.up_scales + i);
        if (gated_ && !one_rotation_)
          rotate_row(matrix(0, expert, slice), x, row, s_.gate_rows + i * m_.hidden,
                     s_.gate_scales + i);
      });
      products(blocks, gated_ ? 0 : 1, 2, slice,
               [&](int p, const Block& block, int64_t column, int columns, const float* sums) {
                 float* const to = p == 0 ? s_.gate : s_.up;
                 const Stack& bias = p == 0 ? m_.gate.bias : m_.up.bias;
                 const int64_t v = block.expert * m_.slices + slice;
                 const int64_t kept = std::min<int64_t>(columns, m_.intermediate - column);
                 for (int64_t r = 0; r < block.count; ++r) {
                   float* const row = to + (block.first + r) * m_.intermediate + column;
                   for (int64_t c = 0; c < kept; ++c) {
                     row[c] = sums[r * kSlabColumns + c];
                     if (bias.data != nullptr)
                       row[c] +=
                           load(bias.data, v % bias.rows * bias.columns + column + c, bias.dtype);
                   }
                 }
               });
      // From here on up's rows hold what down takes.
      const Rows inner{s_.gate, DType::Float, count, m_.intermediate};
      each_row([&](int64_t expert, int64_t i) {
        activate(s_.gate + i * m_.intermediate, s_.up + i * m_.intermediate);
        rotate_row(matrix(2, expert, slice), inner, i, s_.up_rows + i * m_.inner, s_.up_scales + i);
      });
      products(blocks, 2, 3, slice,
               [&](int, const Block& block, int64_t column, int columns, const float* sums) {
                 for (int64_t r = 0; r < block.count; ++r) {
                   float* const row = s_.results + (first + block.first + r) * m_.hidden + column;
                   for (int c = 0; c < columns; ++c)
                     row[c] = (slice == 0 ? 0.0f : row[c]) + sums[r * kSlabColumns + c];
                 }
               });
    }
  }

  // Blocks of even size, up to kRowBlock routes of one expert; returns how many.
  int64_t cut(int64_t token, int64_t first, int64_t count) {
    const auto expert_at = [&](int64_t i) {
      return static_cast<int32_t>(expert_of(token * m_.top_k + s_.order[first + i]));
    };
    int64_t blocks = 0;
    for (int64_t begin = 0, end = 0; begin < count; begin = end) {
      const int32_t expert = expert_at(begin);
      while (end < count && expert_at(end) == expert) ++end;
      const int64_t pieces = (end - begin + kRowBlock - 1) / kRowBlock;
      for (int64_t piece = 0, at = begin; piece < pieces; ++piece) {
        const int64_t size = (end - at) / (pieces - piece);
        s_.blocks[blocks++] = Block{expert, static_cast<int32_t>(at), static_cast<int32_t>(size)};
        at += size;
      }
    }
    return blocks;
  }

  // take(projection, block, first column, columns, sums) for the products of projections
  // [from, to) with all blocks' rotated rows.
  template <typename Take>
  void products(int64_t blocks, int from, int to, int64_t slice, const Take& take) {
    const int64_t out_tiles = (from == 2 ? m_.hidden : m_.inner) / 16;
    const int64_t width = from == 2 ? m_.inner : m_.hidden;
    const int64_t column_blocks = (out_tiles + 7) / 8;
    parallel_for(blocks * (to - from) * column_blocks, 1, [&](int64_t begin, int64_t end) {
      alignas(64) static thread_local float sums[kRowBlock * kSlabColumns];
      for (int64_t item = begin; item < end; ++item) {
        const Block& block = s_.blocks[item / column_blocks / (to - from)];
        const int p = from + static_cast<int>(item / column_blocks % (to - from));
        const int64_t out_tile = item % column_blocks * 8;
        const int tiles = static_cast<int>(std::min<int64_t>(8, out_tiles - out_tile));
        const bool of_gate = p == 0 && !one_rotation_;
        const float* const rows = of_gate ? s_.gate_rows : s_.up_rows;
        const float* const scales = of_gate ? s_.gate_scales : s_.up_scales;
        gemm_block(*kernels_[p], matrix(p, block.expert, slice), out_tile, tiles,
                   rows + block.first * width, scales + block.first, block.count, sums);
        take(p, block, out_tile * 16, tiles * 16, sums);
      }
    });
  }

  // gate = what down takes. Comparisons are such that a NaN stays one.
  void activate(float* gate, const float* up) const {
    const float limit = m_.limit > 0.0f ? m_.limit : INFINITY;
    const float before = m_.limit_after ? INFINITY : limit;
    const float after = m_.limit_after ? limit : INFINITY;
    for (int64_t c = 0; c < m_.intermediate; ++c) {
      if (m_.activation == kRelu2) {
        const float positive = up[c] < 0.0f ? 0.0f : up[c];
        gate[c] = positive * positive;
        continue;
      }
      const float g = gate[c] > before ? before : gate[c];
      const float u = up[c] > limit ? limit : up[c] < -limit ? -limit : up[c];
      if (m_.activation == kSwigluOai) {
        gate[c] = (u + 1.0f) * (g / (1.0f + std::exp(-1.702f * g)));
        continue;
      }
      const float value = curve(g);
      gate[c] = (value > after ? after : value) * u;
    }
  }

  float curve(float g) const {
    switch (m_.activation) {
      case kGelu:
        return 0.5f * g * std::erfc(g * -0.70710678f);
      case kGeluTanh:
        return 0.5f * g * (1.0f + std::tanh(0.79788456f * (g + 0.044715f * g * g * g)));
      default:
        return g / (1.0f + std::exp(-g));
    }
  }

  void reduce(int64_t token, int64_t tokens) {
    const Stack& bias = m_.down.bias;
    parallel_for(tokens, 1, [&](int64_t begin, int64_t end) {
      constexpr int kColumns = 256;
      float sums[kColumns];
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t column = 0; column < m_.columns; column += kColumns) {
          const int64_t columns = std::min<int64_t>(kColumns, m_.columns - column);
          std::fill(sums, sums + columns, 0.0f);
          for (int64_t slot = 0; slot < m_.top_k; ++slot) {
            const int64_t at = s_.position[t * m_.top_k + slot];
            if (at < 0) continue;
            const int64_t route = (token + t) * m_.top_k + slot;
            const float weight = load(m_.weights, route, m_.weights_dtype);
            const float* const row = s_.results + at * m_.hidden + column;
            const int64_t added = bias.data != nullptr ? expert_of(route) * bias.columns : 0;
            for (int64_t c = 0; c < columns; ++c) {
              float value = row[c];
              if (bias.data != nullptr) value += load(bias.data, added + column + c, bias.dtype);
              sums[c] += weight * value;
            }
          }
          for (int64_t c = 0; c < columns; ++c)
            store(m_.y, (token + t) * m_.columns + column + c, m_.y_dtype,
                  sums[c] * m_.routed_scale);
        }
      }
    });
  }

  // By projection; gate and up are exact, so that a route is off by what one layer, down, may be.
  const SlabKernels* const kernels_[3];
  const Moe& m_;
  const Scratch s_;
  const bool gated_, one_rotation_;
};

}  // namespace

int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
                            int64_t inner) {
  Arena arena(nullptr);
  Scratch(arena, tokens, top_k, experts, hidden, inner);
  return arena.used() + 64;
}

void moe(Isa isa, const Moe& m, void* workspace) { Experts(isa, m, workspace).run(); }

}  // namespace trellis
