// How the products of few rows of an expert (experts.cuh) are cut into pieces, and those dealt to thread blocks: as many
// to each, or, where rates differ and pieces are many, in shares of equal cost.
#pragma once

#include "vectors.cuh"

namespace trellis::cuda {

// A unit is a row block's 128 output features of one slice: its gate and up (or down alone), each cut into segments of
// K. A segment of a matrix is a piece; the pieces of all units are laid end to end.
template <bool kDown>
struct Units {
  int column_blocks, blocks, segments;  // 128-blocks of the output and of K; segments of one matrix
  int passes;                           // matrices of a unit: gate and up, or one
  int pieces;                           // of a unit

  __device__ explicit Units(const Moe& m)
      : column_blocks(static_cast<int>((kDown ? m.hidden : m.inner) / 128)),
        blocks(static_cast<int>((kDown ? m.inner : m.hidden) / 128)),
        segments(segments_of(blocks)),
        passes(!kDown && m.gate.suh.data != nullptr ? 2 : 1),
        pieces(passes * segments) {}

  // Pieces of all units.
  __device__ __forceinline__ int all(const Moe& m, int row_blocks) const {
    return row_blocks * static_cast<int>(m.slices) * column_blocks * pieces;
  }
  // Of the table: gate, up, down.
  __device__ __forceinline__ int which(int pass) const {
    return kDown ? 2 : passes == 1 || pass == 1 ? 1 : 0;
  }
};

// What 128 inputs by 128 features of a rate take, in tenths of what they take at 4 bits, by measurement: a digit for
// every 8 words from 16 on (1, 1.5, 2, 2.5, 3, 3.5, 4 bits, then every other digit).
__device__ __forceinline__ int cost_of_rate(int64_t tile_words) {
  constexpr uint64_t kCosts = 0xC0E0D0C0ACCCCCC;
  const int words =
      max(static_cast<int>(tile_words), 16);  // none: an expert that is elsewhere, and has no rows
  return static_cast<int>(kCosts >> (words / 8 - 2) * 4 & 15);
}
constexpr int kCostOfPiece = 60;  // besides

// An expert's matrices of one slice in one launch.
template <bool kDown>
struct Costs {
  int of_block[2], of_pass[2];  // of 128 inputs, of all K
  int of_unit;

  __device__ Costs(const Moe& m, const Units<kDown>& units, int64_t expert, int64_t slice)
      : of_block{}, of_pass{} {
    for (int pass = 0; pass < units.passes; ++pass) {
      of_block[pass] = cost_of_rate(tile_words_of(m, units.which(pass), expert, slice));
      of_pass[pass] = of_block[pass] * units.blocks + kCostOfPiece * units.segments;
    }
    of_unit = of_pass[0] + of_pass[1];
  }

  // The first piece of a unit that begins at this cost or behind it.
  __device__ __forceinline__ int piece_at(const Units<kDown>& units, int cost) const {
    const int pass = cost >= of_pass[0] ? 1 : 0;
    if (pass == 1) cost -= of_pass[0];
    const int of_segment = of_block[pass] * kSegmentBlocks + kCostOfPiece;
    return pass * units.segments + min((cost + of_segment - 1) / of_segment, units.segments);
  }
};

constexpr int kPiecesToCut = 4;  // of a block, from which on it pays to cut by cost

// Which pieces are whose: block b has those from begin(b) on and before begin(b + 1), which may be none. As many for
// each block, or, where the sort has cut by cost, what it left.
template <bool kDown>
struct Shares {
  static constexpr int kNear = 8;  // blocks on either side whose beginnings a block has at hand
  const int* begins;
  const int* near;  // [2 * kNear + 1]: in shared memory
  int total, share;

  // For all threads of a block, before a barrier.
  __device__ __forceinline__ Shares(const Moe& m, const MoeScratch& s, const Units<kDown>& units,
                                    int* near)
      : begins(s.begins + kDown * (gridDim.x + 1)), near(near), share(0) {
    const int4 found = __ldcg(reinterpret_cast<const int4*>(s.count));
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
    const int grid = static_cast<int>(gridDim.x);
    total = units.all(m, found.x);
    if ((kDown ? found.w : found.z) == 0)
      share = max(1, (total + grid - 1) / grid);
    else if (thread <= 2 * kNear)
      near[thread] = __ldcg(begins + min(max(block - kNear + thread, 0), grid));
  }
  __device__ __forceinline__ int begin(int block) const {
    if (share > 0) return min(block * share, total);
    const int place = block - static_cast<int>(blockIdx.x) + kNear;
    return place >= 0 && place <= 2 * kNear ? near[place] : __ldcg(begins + block);
  }
  // Looked for from this block on, since whoever asks shares a unit with it.
  __device__ __forceinline__ int block_of(int piece) const {
    if (share > 0) return piece / share;
    int block = static_cast<int>(blockIdx.x);
    while (begin(block) > piece) --block;
    while (begin(block + 1) <= piece) ++block;
    return block;
  }
  // Blocks that have any of the pieces from `first` on and before `last`.
  __device__ __forceinline__ int blocks_of(int first, int last) const {
    int count = 0;
    for (int block = block_of(first); begin(block) < last; ++block)
      if (begin(block) < begin(block + 1)) ++count;
    return count;
  }
};

}  // namespace trellis::cuda
