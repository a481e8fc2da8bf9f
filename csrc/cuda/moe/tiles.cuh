// The products of routed experts for many rows: tiles of 128 output features by the rows of a row block of an
// expert, each of whose weights is decoded once, as in ../gemm/tiled.cuh. Sums leave as they are, transforms and
// activation have launches of their own (tile_rows.cu).
#pragma once

#include "../../rates.h"
#include "../decode/decode.cuh"
#include "vectors.cuh"

namespace trellis::cuda {

constexpr int kTileWarps = 8;
constexpr int kTileSteps = 4;  // k tiles of a step
// Of copies: as many as leave room for two blocks.
template <int kTerms>
constexpr int kTileStages = kTerms == 1 ? 3 : 2;

template <int kTerms>
constexpr int kTileX = kTileGroups * 1024 * kTerms;  // bytes of a step of x
// Bytes of a stage at the highest rate, which all have room for.
template <int kTerms>
constexpr int kTileStage = kTileX<kTerms> + kTileSteps * 8 * 256;
template <int kTerms>
constexpr int kTileShared = kTileStages<kTerms> * kTileStage<kTerms>;

// A tile: 128 output features of a matrix and a row block's rows.
struct TileItem {
  const char* packed;   // the tile's first column, at k = 0
  int64_t row_bytes;    // from one k tile to the next
  const char* x;        // atoms of its rows, an eight after the other, at k = 0
  int64_t step_bytes;   // from one step's atoms to the next one's
  const float* scales;  // of its rows
  float* out;           // its first row and feature
  int64_t out_stride;
  int steps, rows, tile_words, codebook;
};

// The tiles of one of the two launches. Those of one row block and matrix follow each other, so that the cache
// serves its rows.
template <bool kDown>
struct Tiles {
  int column_blocks, passes, rotations, total;

  __device__ Tiles(const Moe& m, const MoeScratch& s)
      : column_blocks(static_cast<int>((kDown ? m.hidden : m.inner) / 128)),
        passes(!kDown && m.gate.suh.data != nullptr ? 2 : 1),
        rotations(kDown || one_rotation(m) ? 1 : 2),
        total(s.count[0] * static_cast<int>(m.slices) * passes * column_blocks) {}

  __device__ TileItem at(const Moe& m, const MoeScratch& s, int terms, int tile) const {
    const int slices = static_cast<int>(m.slices), of_block = slices * passes * column_blocks;
    const int64_t out = kDown ? m.hidden : m.inner;
    const int row_block = tile / of_block, within = tile - row_block * of_block;
    const int column_block = within % column_blocks, pass = within / column_blocks % passes;
    const int slice = within / column_blocks / passes;
    const int which = kDown ? 2 : passes == 1 || pass == 1 ? 1 : 0;
    const longlong2 entry = s.matrices[(row_block * slices + slice) * 3 + which];
    const int first = s.first[row_block];
    const int64_t place = slice * rotations + (rotations == 2 ? pass : 0);
    TileItem item;
    item.steps = static_cast<int>((kDown ? m.inner : m.hidden) / 64);
    item.tile_words = static_cast<int>(entry.y);
    item.codebook = kDown ? m.down.codebook : which == 0 ? m.gate.codebook : m.up.codebook;
    item.row_bytes = static_cast<int64_t>(column_blocks) * 8 * item.tile_words * 2;
    item.packed = reinterpret_cast<const char*>(m.packed + entry.x) +
                  static_cast<int64_t>(column_block) * 8 * item.tile_words * 2;
    item.step_bytes = s.slots / 8 * terms * 1024;
    item.x = reinterpret_cast<const char*>(kDown ? s.inner : s.x) +
             place * item.steps * item.step_bytes + static_cast<int64_t>(first / 8) * terms * 1024;
    item.scales = (kDown ? s.inner_scales : s.x_scales) + place * s.slots + first;
    const int64_t result = kDown ? slice : slice * 2 + (which == 1 ? 1 : 0);
    item.out = (kDown ? s.results : s.sums) + (result * s.slots + first) * out + column_block * 128;
    item.out_stride = out;
    // An expert's last row block ends where the next expert's slots begin.
    const bool last = row_block + 1 == s.count[0] || s.expert[row_block + 1] != s.expert[row_block];
    const int end = row_block + 1 == s.count[0] ? s.count[1] : s.first[row_block + 1];
    item.rows = last ? end - first : s.row_groups * 8;
    return item;
  }
};

// A thread's sums as mma and wgmma leave them: rows 8 g + 2 * (lane % 4) + {0, 1}, features lane / 4 and 8 on of
// the warp's 16.
template <int kSums>
__device__ __forceinline__ void write_tile(const TileItem& item, const float (&sums)[kSums]) {
  const int lane = threadIdx.x % 32, feature = threadIdx.x / 32 * 16 + lane / 4;
  const int own = lane % 4 * 2, stride = static_cast<int>(item.out_stride);
  float* at = item.out + own * item.out_stride + feature;
  // Rows come in eights, of which the last may be padding: their sums are zeros, and nobody reads them.
  const auto scales_of = [&](int group) {
    return __ldcg(reinterpret_cast<const float2*>(item.scales + group * 8 + own));
  };
  constexpr int kGroups = kSums / 4, kTogether = 4;  // whose scales are waited for at a time
#pragma unroll
  for (int first = 0; first < kGroups; first += kTogether) {
    float2 scales[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if ((first + i) * 8 < item.rows) scales[i] = scales_of(first + i);
#pragma unroll
    for (int i = 0; i < kTogether; ++i, at += 8 * stride) {
      if ((first + i) * 8 >= item.rows) return;
      const float* const four = sums + (first + i) * 4;
      at[0] = four[0] * scales[i].x, at[8] = four[2] * scales[i].x;
      at[stride] = four[1] * scales[i].y, at[stride + 8] = four[3] * scales[i].y;
    }
  }
}

// What a thread copies of a step, 16 bytes at a time: always the same places, which move on with the steps.
// Stages hold x, then the packed words.
template <int kTerms, int kStages>
struct TileCopies {
  static constexpr int kThreads = kTileWarps * 32;
  static constexpr int kXPieces = kTerms * 64;            // of eight rows
  static constexpr int kXGroups = kThreads / kXPieces;    // eights of rows that go together
  static constexpr int kOfKTile = kThreads / kTileSteps;  // threads that share a k tile
  static_assert(2 * kOfKTile >= 128, "a k tile has 128 pieces at most");

  const char *x_from, *packed_from;
  uint32_t x_step, packed_step, first_stage, to, packed_to;
  int x_left, packed_left;  // eights of rows, and pieces of a k tile, from this thread's first on
  int steps_left;

  __device__ TileCopies(const TileItem& item, const char* stages)
      : x_from(item.x + threadIdx.x * 16),
        x_step(hold(static_cast<uint32_t>(item.step_bytes))),
        packed_step(hold(static_cast<uint32_t>(item.row_bytes) * kTileSteps)),
        first_stage(hold(shared_address(stages))),
        to(first_stage),
        x_left((item.rows + 7) / 8 - static_cast<int>(threadIdx.x) / kXPieces),
        steps_left(item.steps) {
    const int k_tile = threadIdx.x / kOfKTile, piece = threadIdx.x % kOfKTile;
    packed_from = item.packed + k_tile * item.row_bytes + piece * 16;
    packed_to = kTileX<kTerms> + k_tile * item.tile_words * 16 + piece * 16;
    packed_left = item.tile_words - piece;
  }

  __device__ __forceinline__ uint32_t next(uint32_t stage) const {
    constexpr int kStage = kTileStage<kTerms>;
    return stage == first_stage + (kStages - 1) * kStage ? first_stage : stage + kStage;
  }

  // Starts the copies of the next step, if there is one.
  __device__ __forceinline__ void bring() {
    if (steps_left-- > 0) {
      const uint32_t mine = to + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < kTileGroups / kXGroups; ++i)
        if (i * kXGroups < x_left)
          copy_async_16(mine + i * kThreads * 16, x_from + i * kThreads * 16);
      x_from += x_step;
      if (packed_left > 0) copy_async_16(to + packed_to, packed_from);
      if (packed_left > kOfKTile)
        copy_async_16(to + packed_to + kOfKTile * 16, packed_from + kOfKTile * 16);
      packed_from += packed_step;
      to = next(to);
    }
    copy_commit();
  }
};

template <int kTileWords, int kCodebook, int kTerms>
__device__ __noinline__ void multiply_tile(const TileItem item, const PowersOfTwo& powers,
                                           char* stages) {
  constexpr int kTileBytes = kTileWords * 2;
  constexpr int kKTile = 8 * kTileBytes;
  constexpr int kX = kTileX<kTerms>;
  constexpr int kStages = kTileStages<kTerms>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Window<kTileWords> window(lane);
  for (int& index : window.index) index = static_cast<int>(hold(index * 4u));  // bytes from here on
  const Hash hash = hash_for<kCodebook>();
  const int groups = (item.rows + 7) / 8;
  TileCopies<kTerms, kStages> copies(item, stages);
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) copies.bring();

  // This lane's address of the four matrices that it loads at a time: 16-byte piece p of row r of an atom lies at
  // piece p ^ r.
  const int matrix = lane / 8, row = lane % 8;
  uint32_t x_at[kTileSteps];
#pragma unroll
  for (int i = 0; i < kTileSteps; ++i)
    x_at[i] = hold(static_cast<uint32_t>(matrix / 2 * (kTerms * 1024) + row * 128 +
                                         ((i * 2 + matrix % 2) ^ row) * 16));

  float sums[kTileGroups * 4] = {};
  uint32_t stage = copies.first_stage;
  for (int step = 0; step < item.steps; ++step, stage = copies.next(stage)) {
    copy_wait<kStages - 2>();
    __syncthreads();  // everybody's copies are there, and the stage before is done with
    copies.bring();
    const uint32_t packed = stage + kX + warp * kTileBytes;
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) {
      uint32_t v[3], p[8], a[4];
      const uint32_t tile = packed + i * kKTile;
      load_stretch<kTileWords>([=](int byte) { return load_shared(tile + byte); }, window, v);
      products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
      packed_values<kCodebook == kMul1>(p, a);
      const uint32_t from = stage + x_at[i];
#pragma unroll
      for (int pair = 0; pair < kTileGroups / 2; ++pair) {
        if (pair * 2 >= groups) break;
#pragma unroll
        for (int term = 0; term < kTerms; ++term) {
          uint32_t b[4];
          load_matrices(b, from + (pair * 2 * kTerms + term) * 1024);
          auto& first = *reinterpret_cast<float (*)[4]>(sums + pair * 8);
          auto& second = *reinterpret_cast<float (*)[4]>(sums + pair * 8 + 4);
          mma_f16(first, a[0], a[1], a[2], a[3], b[0], b[1]);
          mma_f16(second, a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
  }
  copy_wait<0>();
  __syncthreads();  // before the next tile's copies

  write_tile(item, sums);
}

template <bool kDown, int kTerms>
__global__ void __launch_bounds__(kTileWarps * 32, 2)
    tile_kernel(const Moe m, const MoeScratch s, const PowersOfTwo powers) {
  extern __shared__ __align__(128) char stages[];
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Tiles<kDown> tiles(m, s);
  for (int at = static_cast<int>(blockIdx.x); at < tiles.total; at += static_cast<int>(gridDim.x)) {
    const TileItem item = tiles.at(m, s, kTerms, at);
    with_rate(item.tile_words, [&](auto tile_words) {
      with_codebook<tile_words.value>(item.codebook, [&](auto codebook) {
        multiply_tile<decltype(tile_words)::value, decltype(codebook)::value, kTerms>(item, powers,
                                                                                      stages);
      });
    });
  }
}

}  // namespace trellis::cuda
