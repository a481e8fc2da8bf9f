// The products of routed experts for many rows: tiles of 128 output features by up to 128 rows of an expert,
// each of whose weights is decoded once, as in ../gemm/tiled.cuh. Sums leave as they are, transforms and
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
// Of the highest rate, which all have room for.
template <int kTerms>
constexpr int kTileShared = kTileStages<kTerms> * (kTileX<kTerms> + kTileSteps * 8 * 256);

struct TileItem {
  const char* packed;   // the tile's first column, at k = 0
  int64_t row_bytes;    // from one k tile to the next
  const char* x;        // atoms of its first eight rows
  int64_t group_bytes;  // from one eight to the next
  const float* scales;  // of its rows
  float* out;           // its first row and feature
  int64_t out_stride;
  int steps, rows, tile_words, codebook;
};

template <int kTileWords, int kCodebook, int kTerms>
__device__ __noinline__ void multiply_tile(const TileItem item, const PowersOfTwo& powers,
                                           char* stages) {
  constexpr int kTileBytes = kTileWords * 2;
  constexpr int kKTile = 8 * kTileBytes;
  constexpr int kX = kTileX<kTerms>;
  constexpr int kStages = kTileStages<kTerms>;
  constexpr int kStage = kX + kTileSteps * 8 * 256;
  constexpr int kThreads = kTileWarps * 32;
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  Window<kTileWords> window(lane);
  for (int& index : window.index) index = static_cast<int>(hold(index * 4u));  // bytes from here on
  const Hash hash = hash_for<kCodebook>();
  const int groups = (item.rows + 7) / 8;

  // What a thread copies of a step, 16 bytes at a time: always the same place of x and of the packed words, which
  // moves on with the steps.
  constexpr int kXPieces = kTerms * 64;                   // of eight rows
  constexpr int kXGroups = kThreads / kXPieces;           // eights of rows that go together
  constexpr int kPackedPieces = kTileSteps * kTileWords;  // of a step
  constexpr int kPackedRounds = (kPackedPieces + kThreads - 1) / kThreads;
  const int x_group = thread / kXPieces;
  const char* x_from = item.x + x_group * item.group_bytes + thread % kXPieces * 16;
  const uint64_t x_round = hold(static_cast<uint64_t>(item.group_bytes) * kXGroups);
  const char* packed_from[kPackedRounds];
#pragma unroll
  for (int i = 0; i < kPackedRounds; ++i) {
    const int piece = thread + i * kThreads;
    packed_from[i] = item.packed + piece / kTileWords * item.row_bytes + piece % kTileWords * 16;
  }
  const uint64_t packed_step = hold(static_cast<uint64_t>(item.row_bytes) * kTileSteps);
  const uint32_t first_stage = hold(shared_address(stages));
  const auto next = [&](uint32_t stage) {
    return stage == first_stage + (kStages - 1) * kStage ? first_stage : stage + kStage;
  };
  uint32_t to = first_stage;
  int to_bring = item.steps;
  const auto bring = [&] {
    if (to_bring-- > 0) {
      const uint32_t mine = to + thread * 16;
      const char* from = x_from;
#pragma unroll
      for (int i = 0; i < kTileGroups / kXGroups; ++i, from += x_round)
        if (x_group + i * kXGroups < groups) copy_async_16(mine + i * kThreads * 16, from);
      x_from += kTerms * 1024;
#pragma unroll
      for (int i = 0; i < kPackedRounds; ++i) {
        if (thread + i * kThreads < kPackedPieces)
          copy_async_16(mine + kX + i * kThreads * 16, packed_from[i]);
        packed_from[i] += packed_step;
      }
      to = next(to);
    }
    copy_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStages - 1; ++i) bring();

  // This lane's address of the four matrices that it loads at a time: 16-byte piece p of row r of an atom lies at
  // piece p ^ r.
  const int matrix = lane / 8, row = lane % 8;
  uint32_t x_at[kTileSteps];
#pragma unroll
  for (int i = 0; i < kTileSteps; ++i)
    x_at[i] = hold(static_cast<uint32_t>(matrix / 2 * (kTerms * 1024) + row * 128 +
                                         ((i * 2 + matrix % 2) ^ row) * 16));

  float sums[kTileGroups][4] = {};
  uint32_t stage = first_stage;
  for (int step = 0; step < item.steps; ++step, stage = next(stage)) {
    copy_wait<kStages - 2>();
    __syncthreads();  // everybody's copies are there, and the stage before is done with
    bring();
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
          mma_f16(sums[pair * 2], a[0], a[1], a[2], a[3], b[0], b[1]);
          mma_f16(sums[pair * 2 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
        }
      }
    }
  }
  copy_wait<0>();
  __syncthreads();  // before the next tile's copies

  const int feature = warp * 16 + lane / 4;
#pragma unroll
  for (int group = 0; group < kTileGroups; ++group) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_tile = group * 8 + lane % 4 * 2 + i;
      if (of_tile >= item.rows) continue;
      const float scale = item.scales[of_tile];
      float* const at = item.out + of_tile * item.out_stride + feature;
      at[0] = sums[group][i] * scale;
      at[8] = sums[group][2 + i] * scale;
    }
  }
}

template <bool kDown, int kTerms>
__global__ void __launch_bounds__(kTileWarps * 32, 2)
    tile_kernel(const Moe m, const MoeScratch s, const PowersOfTwo powers) {
  extern __shared__ __align__(128) char stages[];
  let_next_kernel_start();
  const int64_t in = kDown ? m.inner : m.hidden, out = kDown ? m.hidden : m.inner;
  const int slices = static_cast<int>(m.slices), column_blocks = static_cast<int>(out / 128);
  const bool gated = m.gate.suh.data != nullptr;
  const int passes = !kDown && gated ? 2 : 1;
  const int rotations = kDown || one_rotation(m) ? 1 : 2;
  const int steps = static_cast<int>(in / 64);
  const int64_t group_bytes = static_cast<int64_t>(steps) * kTerms * 1024;
  wait_for_previous_kernel();
  const int of_block = slices * passes * column_blocks;
  const int total = s.count[0] * of_block;
  // Items of one row block and matrix follow each other, so that the cache serves its rows.
  for (int at = static_cast<int>(blockIdx.x); at < total; at += static_cast<int>(gridDim.x)) {
    const int row_block = at / of_block, within = at - row_block * of_block;
    const int column_block = within % column_blocks, pass = within / column_blocks % passes;
    const int slice = within / column_blocks / passes;
    const int which = kDown ? 2 : passes == 1 || pass == 1 ? 1 : 0;
    const longlong2 entry = s.matrices[(row_block * slices + slice) * 3 + which];
    const int first = s.first[row_block];
    const int64_t place = slice * rotations + (rotations == 2 ? pass : 0);
    TileItem item;
    item.tile_words = static_cast<int>(entry.y);
    item.codebook = kDown ? m.down.codebook : which == 0 ? m.gate.codebook : m.up.codebook;
    item.row_bytes = static_cast<int64_t>(column_blocks) * 8 * item.tile_words * 2;
    item.packed = reinterpret_cast<const char*>(m.packed + entry.x) +
                  static_cast<int64_t>(column_block) * 8 * item.tile_words * 2;
    item.x = reinterpret_cast<const char*>(kDown ? s.inner : s.x) +
             (place * (s.slots / 8) + first / 8) * group_bytes;
    item.group_bytes = group_bytes;
    item.scales = (kDown ? s.inner_scales : s.x_scales) + place * s.slots + first;
    const int64_t result = kDown ? slice : slice * 2 + (which == 1 ? 1 : 0);
    item.out = (kDown ? s.results : s.sums) + (result * s.slots + first) * out + column_block * 128;
    item.out_stride = out;
    item.steps = steps;
    // An expert's last row block ends where the next expert's slots begin.
    const bool last = row_block + 1 == s.count[0] || s.expert[row_block + 1] != s.expert[row_block];
    const int end = row_block + 1 == s.count[0] ? s.count[1] : s.first[row_block + 1];
    item.rows = last ? end - first : kTileGroups * 8;
    with_rate(item.tile_words, [&](auto tile_words) {
      with_codebook<tile_words.value>(item.codebook, [&](auto codebook) {
        multiply_tile<decltype(tile_words)::value, decltype(codebook)::value, kTerms>(item, powers,
                                                                                      stages);
      });
    });
  }
}

// Both products; instantiated in tiles_*.cu.
template <int kTerms>
cudaError_t launch_tiles_of_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                                    cudaStream_t stream);

}  // namespace trellis::cuda
