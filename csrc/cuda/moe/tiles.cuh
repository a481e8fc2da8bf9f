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
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Window<kTileWords> window(lane);
  const Hash hash = hash_for<kCodebook>();
  const int groups = (item.rows + 7) / 8;
  const int matrix = lane / 8, row = lane % 8;

  const auto bring = [&](int step) {
    if (step < item.steps) {
      char* const to = stages + step % kStages * kStage;
      const char* const x = item.x + static_cast<int64_t>(step) * kTerms * 1024;
      for (int at = threadIdx.x * 16; at < groups * kTerms * 1024; at += kTileWarps * 512) {
        const int group = at / (kTerms * 1024);
        copy_async_16(to + at, x + group * item.group_bytes + (at - group * kTerms * 1024));
      }
      const char* const packed =
          item.packed + static_cast<int64_t>(step) * kTileSteps * item.row_bytes;
      for (int at = threadIdx.x * 16; at < kTileSteps * kKTile; at += kTileWarps * 512) {
        const int k_tile = at / kKTile;
        copy_async_16(to + kX + at, packed + k_tile * item.row_bytes + (at - k_tile * kKTile));
      }
    }
    copy_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) bring(i);

  float sums[kTileGroups][4] = {};
  for (int step = 0; step < item.steps; ++step) {
    copy_wait<kStages - 2>();
    __syncthreads();  // everybody's copies are there, and the stage before is done with
    bring(step + kStages - 1);
    const uint32_t x = shared_address(stages + step % kStages * kStage);
    const uint32_t packed = x + kX + warp * kTileBytes;
#pragma unroll
    for (int i = 0; i < kTileSteps; ++i) {
      uint32_t v[3], p[8], a[4];
      const uint32_t tile = packed + i * kKTile;
      load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
      products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
      packed_values<kCodebook == kMul1>(p, a);
      // 16-byte piece p of row r of an atom lies at piece p ^ r.
      const uint32_t from =
          x + matrix / 2 * (kTerms * 1024) + row * 128 + ((i * 2 + matrix % 2) ^ row) * 16;
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
