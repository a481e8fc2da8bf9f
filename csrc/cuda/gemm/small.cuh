// y for few rows (at most 32): weights stream past once, straight from packed words into MMA operands.
//
// Two launches. `rotate_rows` (rotate.cu) turns the rows into MMA fragments of H(x * suh). Then each
// block of `small_kernel` takes an equal share of the whole matrix: the groups of k tiles of all column
// blocks (128 output features, one Hadamard block) are laid end to end and cut into as many stretches
// as fit the GPU at once, so that no multiprocessor waits for another. Within a stretch the eight warps
// share the inputs of one column block after the other; each has a ring of packed tiles of its own,
// filled by asynchronous copies, and its own sums, and meets the others only at the end of a column block.
// There the warps' sums are added in order; a column block that lies in several stretches is finished by
// whichever block comes last, which adds the parts in their order (the order of the sums never depends
// on who is last, so results are bitwise repeatable), transforms, scales by svh, adds bias and rounds.
//
// Weights are the A operand (16 output features a tile), rows the N = 8 columns of B. For few rows
// the codebook value never exists:
//   halves (3inst, mcg)  the two FP16 halves of a product are two K elements with x repeated; a row
//                        has one scale, since FP16 keeps its precision over 2^24 below the largest
//   bytes (mul1, m <= 4) its four bytes are four K elements of an integer MMA with x repeated; x is a
//                        16-bit integer, high and low bytes in different columns, with a scale for
//                        each block of 128 inputs, where the exact sums are folded into float32 ones
// Beyond, decoding is a smaller part of the work than multiplying:
//   packed (all)         the value in FP16, one MMA for each tile and eight rows
#pragma once

#include "../decode/decode.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {

constexpr int kSmallWarps = 8;
constexpr int kSmallBlocks = 2;  // that a multiprocessor has registers for
constexpr int kSmallTiles = 8;   // output tiles of a block: 128 features, one Hadamard block
constexpr int kSmallSums = kSmallTiles * 128;  // floats of a column block's sums

// How a block's warps share its tiles.
struct SmallCut {
  // Output tiles of a warp: all eight, so that what each k tile costs is shared by many, or half of them
  // where there are no registers for so many sums.
  int tiles;
  int group;   // k tiles that a warp fetches and multiplies at a time
  int stages;  // groups in flight; two where they are large, so that two blocks fit a multiprocessor
  __host__ __device__ constexpr int depth() const { return kSmallWarps * tiles / kSmallTiles; }
};
__host__ __device__ constexpr SmallCut small_cut(int tile_words, Operand operand, int row_groups) {
  const int stages = tile_words <= 64 ? 3 : 2;
  return row_groups == 4 ? SmallCut{4, 4, stages} : SmallCut{8, 2, stages};
}

// What the first launch leaves for the second, and where the blocks meet.
struct SmallScratch {
  Rotated rotated;  // its counters: one a column block
  float* parts;     // [blocks][2][eights of rows][kSmallSums]: its first and last column block
};

inline Operand small_operand(const Gemm& g) {
  const bool mul1 = g.codebook == 2;
  if (!mul1) return g.m <= 2 * kSmallRows ? Operand::kHalves : Operand::kPackedHalves;
  return g.m <= 4 ? Operand::kBytes : Operand::kPackedMul1;
}
// Eights of rows that a kernel is instantiated for.
inline int small_row_groups(const Gemm& g) { return g.m <= 8 ? 1 : g.m <= 16 ? 2 : 4; }
inline SmallCut small_cut(const Gemm& g) {
  return small_cut(g.tile_words, small_operand(g), small_row_groups(g));
}
inline int64_t small_column_blocks(const Gemm& g) {
  return (g.out_tiles + kSmallTiles - 1) / kSmallTiles;
}
inline int64_t small_groups(const Gemm& g) {
  const int group = small_cut(g).group;
  return (g.in_tiles + group - 1) / group * small_column_blocks(g);
}
inline int64_t small_stretches(const Gemm& g, int64_t share) {
  return (small_groups(g) + share - 1) / share;
}

// kRowGroups: eights of rows.
template <Operand kOperand, int kRowGroups>
struct SmallShape {
  static constexpr bool kInteger = is_integer(kOperand);
  // What a lane holds of x for one k tile, and the 32-bit words of a k tile's fragments.
  static constexpr int kLaneWords = kInteger ? 1 : 2 * kRowGroups;
  static constexpr int kTileStride = 32 * kLaneWords;
};

template <int kTileWords, Operand kOperand, int kRowGroups>
struct SmallLayout {  // of shared memory, in 32-bit words
  static constexpr SmallCut kCut = small_cut(kTileWords, kOperand, kRowGroups);
  static constexpr int kTile = kTileWords / 2;
  static constexpr int kKTile = kCut.tiles * kTile;  // what a warp takes of a k tile
  static constexpr int kStage = kCut.group * kKTile;
  static constexpr int kRing = kCut.stages * kStage;
  static constexpr int kRings = kSmallWarps * kRing;
  static constexpr int kSums =
      kCut.depth() * kSmallSums;  // in the rings' place, once they are done
  static constexpr int kBlockSums = kRings > kSums ? kRings : kSums;
  static constexpr int kFlag = kBlockSums + kSmallSums;
  static constexpr int kBytes = (kFlag + 2) * 4;
};

// The last step of eight rows of a column block whose sums are complete: one warp a row.
template <bool kBytesInColumns>
__device__ __forceinline__ void finish_column_block(const Gemm& g, const float* block_sums,
                                                    const float* row_scales, int64_t column_block,
                                                    int first_row) {
  const int lane = threadIdx.x % 32, of_eight = threadIdx.x / 32, row = first_row + of_eight;
  if (row < g.m) {
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      z[i] = block_sums[sum_index(of_eight, lane * 4 + i)];
      if constexpr (kBytesInColumns) z[i] += block_sums[sum_index(of_eight + 4, lane * 4 + i)];
    }
    finish_row(g, z, row, column_block * 128, row_scales[row]);
  }
}

// `share`: groups of k tiles in a block's stretch.
template <int kTileWords, int kCodebook, Operand kOperand, int kRowGroups>
__global__ void __launch_bounds__(kSmallWarps * 32, kSmallBlocks)
    small_kernel(const Gemm g, const SmallScratch scratch, const int share,
                 const PowersOfTwo powers) {
  using Shape = SmallShape<kOperand, kRowGroups>;
  using Layout = SmallLayout<kTileWords, kOperand, kRowGroups>;
  constexpr int kTiles = Layout::kCut.tiles;
  constexpr int kGroup = Layout::kCut.group;
  constexpr int kStages = Layout::kCut.stages;
  constexpr int kDepthWarps = Layout::kCut.depth();
  constexpr int kColumnWarps = kSmallWarps / kDepthWarps;
  constexpr int kBlockGroups = 8 / kGroup;  // groups of 128 inputs
  // At 4 bits a lane's last word is that of the lane's number, and so one load brings it for four tiles.
  constexpr bool kFourAtATime = kTileWords == 64;
  // k tiles whose x is loaded at a time: as many as registers allow.
  constexpr int kAhead = kRowGroups == 1 ? kGroup : 1;

  extern __shared__ __align__(128) uint32_t shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = hold(shared_address(shared + warp * Layout::kRing));
  constexpr uint32_t kRingBytes = Layout::kRing * 4, kStageBytes = Layout::kStage * 4;
  float* const block_sums = reinterpret_cast<float*>(shared + Layout::kBlockSums);
  const int depth = warp / kColumnWarps;                       // which share of the inputs
  const int column = warp % kColumnWarps * kTiles;             // first tile of its columns
  float4* const all_sums = reinterpret_cast<float4*>(shared);  // [depth][kSmallSums / 4]
  // 32-bit on purpose: divisions of 64-bit numbers would take longer than a small layer's product.
  const int groups = static_cast<int>((g.in_tiles + kGroup - 1) / kGroup);
  const int column_blocks = static_cast<int>((g.out_tiles + kSmallTiles - 1) / kSmallTiles);
  const int begin = static_cast<int>(blockIdx.x) * share;
  const int stop = min(begin + share, groups * column_blocks);
  const uint64_t row_stride = hold(static_cast<uint64_t>(g.out_tiles) * (Layout::kTile * 4));
  const uint32_t lane_bytes = hold(lane * 16u);
  const uint64_t policy = evict_first();
  const Hash hash = hash_for<kCodebook>();
  Window<kTileWords> window(lane);
  for (int& index : window.index) index = static_cast<int>(hold(index * 4u));  // bytes from here on
  const int pair_row = lane % 4 * 2;  // this lane's columns of the MMA result
  uint32_t stage = ring;
  bool waited = false;

  for (int at = begin; at < stop;) {
    const int column_block = at / groups;
    const int low = at - column_block * groups;
    const int length = min(groups - low, stop - at);
    const int first = low + length * depth / kDepthWarps;
    const int last = low + length * (depth + 1) / kDepthWarps;
    const int64_t first_tile = static_cast<int64_t>(column_block) * kSmallTiles + column;
    const int tiles = static_cast<int>(
        max(static_cast<int64_t>(0), min(static_cast<int64_t>(kTiles), g.out_tiles - first_tile)));
    const int row_bytes = tiles * kTileWords * 2;
    const int end = tiles > 0 ? last : first;
    const char* source =
        reinterpret_cast<const char*>(g.trellis) + lane_bytes +
        (static_cast<int64_t>(first) * kGroup * g.out_tiles + first_tile) * (Layout::kTile * 4);
    // k tiles still to be fetched; the last group of all may be a short one.
    int rows_left = static_cast<int>(min(g.in_tiles, static_cast<int64_t>(end) * kGroup) -
                                     static_cast<int64_t>(first) * kGroup);
    // 16 bytes a lane and step.
    const auto fetch = [&](uint32_t to) {
      to += lane_bytes;
      const auto fetch_rows = [&](auto here) {
        const char* from = source;
#pragma unroll
        for (int i = 0; i < kGroup; ++i, from += row_stride) {
#pragma unroll
          for (int byte = 0; byte < Layout::kKTile * 4; byte += 512) {
            if (here(i, byte))
              copy_async_16(to + i * Layout::kKTile * 4 + byte, from + byte, policy);
          }
        }
      };
      // The usual case by itself, free of conditions.
      if (Layout::kKTile % 128 == 0 && tiles == kTiles && rows_left >= kGroup)
        fetch_rows([](int, int) { return true; });
      else
        fetch_rows([&](int i, int byte) {
          return i < rows_left && static_cast<int>(lane_bytes) + byte < row_bytes;
        });
      copy_commit();
      source += kGroup * row_stride;
      rows_left -= kGroup;
    };
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      fetch(stage);
      stage = stage == ring + kRingBytes - kStageBytes ? ring : stage + kStageBytes;
    }

    // Whoever finishes the column block needs these at once.
    if (warp == 0 && lane < 2 && g.svh != nullptr)
      prefetch(static_cast<const __half*>(g.svh) + column_block * 128 + lane * 64);

    // The activations come from the launch in front; the weights above did not have to wait for it.
    // What it wrote is read by plain loads only: the compiler may move read-only ones before the wait.
    if (!waited) wait_for_previous_kernel();
    waited = true;

    const uint32_t* x_source = scratch.rotated.x +
                               static_cast<int64_t>(first) * kGroup * Shape::kTileStride +
                               lane * (Shape::kInteger ? 1 : 2);
    uint32_t next[kAhead][Shape::kLaneWords] = {};
    const auto load_x = [&] {  // the last time from beyond the last group: room is there
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int w = 0; w < Shape::kLaneWords; w += Shape::kInteger ? 1 : 2) {
          const uint32_t* const from = x_source + i * Shape::kTileStride + w * 32;
          if constexpr (Shape::kInteger) {
            next[i][w] = *from;
          } else {
            const uint2 pair = *reinterpret_cast<const uint2*>(from);
            next[i][w] = pair.x, next[i][w + 1] = pair.y;
          }
        }
      }
      x_source += kAhead * Shape::kTileStride;
    };
    load_x();

    float sums[kRowGroups][kTiles][4] = {};
    int whole[kTiles][4] = {};  // bytes: sums of the current 128-block
    float correction = 0.0f;    // bytes: of row `lane`, lanes 0..7
    float scale[2] = {};

    for (int group = first; group < end; ++group) {
      if constexpr (Shape::kInteger) {
        if (group == first || group % kBlockGroups == 0) {  // a block of 128 inputs begins
          const int64_t block = static_cast<int64_t>(group / kBlockGroups) * kSmallRows;
          // Columns 0..3 hold the rows' high bytes and 4..7 their low bytes.
          const float weight = pair_row < 4 ? 256.0f * kMul1Scale : kMul1Scale;
          const int row = pair_row % 4;
          scale[0] = weight * scratch.rotated.scales[block + row];
          scale[1] = weight * scratch.rotated.scales[block + row + 1];
          // Whoever has a block's first group adds its correction.
          if (group % kBlockGroups == 0 && lane < kSmallRows)
            correction += scratch.rotated.corrections[block + lane];
        }
      }
      copy_wait<kStages - 1>();
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        // A fragment's two registers for each eight rows, or four where K elements repeat.
        uint32_t x[kRowGroups][4];
        const uint32_t (&now)[Shape::kLaneWords] = next[i % kAhead];
        if constexpr (is_packed(kOperand)) {
#pragma unroll
          for (int r = 0; r < kRowGroups; ++r) x[r][0] = now[2 * r], x[r][1] = now[2 * r + 1];
        } else if constexpr (Shape::kInteger) {
          x[0][0] = __byte_perm(now[0], 0, 0x0000);
          x[0][1] = __byte_perm(now[0], 0, 0x1111);
          x[0][2] = __byte_perm(now[0], 0, 0x2222);
          x[0][3] = __byte_perm(now[0], 0, 0x3333);
        } else {
#pragma unroll
          for (int r = 0; r < kRowGroups; ++r) {
            x[r][0] = __byte_perm(now[2 * r], 0, 0x1010);
            x[r][1] = __byte_perm(now[2 * r], 0, 0x3232);
            x[r][2] = __byte_perm(now[2 * r + 1], 0, 0x1010);
            x[r][3] = __byte_perm(now[2 * r + 1], 0, 0x3232);
          }
        }
        if (i % kAhead == kAhead - 1) load_x();
        uint32_t own[4] = {};
#pragma unroll
        for (int j = 0; j < kTiles; ++j) {
          uint32_t v[3], p[8];
          const uint32_t tile = stage + (i * Layout::kKTile + j * Layout::kTile) * 4;
          if constexpr (kFourAtATime) {
            if (j % 4 == 0) load_matrices(own, tile + lane_bytes);
            v[0] = own[j % 4], v[1] = load_shared(tile + window.index[1]);
          } else {
            load_stretch<kTileWords>([=](int byte) { return load_shared(tile + byte); }, window, v);
          }
          products<kTileWords, kOperand != Operand::kPackedMul1>(v, hash, powers, p);
          if constexpr (Shape::kInteger) {
            mma_u8s8(whole[j], p[0], p[4], p[1], p[5], x[0][0], x[0][1]);
            mma_u8s8(whole[j], p[2], p[6], p[3], p[7], x[0][2], x[0][3]);
          } else if constexpr (kOperand == Operand::kHalves) {
#pragma unroll
            for (uint32_t& product : p) product = halves(product);
#pragma unroll
            for (int r = 0; r < kRowGroups; ++r) {
              mma_f16(sums[r][j], p[0], p[4], p[1], p[5], x[r][0], x[r][1]);
              mma_f16(sums[r][j], p[2], p[6], p[3], p[7], x[r][2], x[r][3]);
            }
          } else {
            uint32_t a[4];
            packed_values<kOperand == Operand::kPackedMul1>(p, a);
#pragma unroll
            for (int r = 0; r < kRowGroups; ++r)
              mma_f16(sums[r][j], a[0], a[1], a[2], a[3], x[r][0], x[r][1]);
          }
        }
      }
      __syncwarp();  // everybody has read the stage before it is filled again
      fetch(stage);
      stage = stage == ring + kRingBytes - kStageBytes ? ring : stage + kStageBytes;

      if constexpr (Shape::kInteger) {
        if (group % kBlockGroups == kBlockGroups - 1 || group + 1 == end) {
#pragma unroll
          for (int j = 0; j < kTiles; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              // Each sum stays within 2^24 over one block, so no conversion rounds.
              sums[0][j][i] = fmaf(static_cast<float>(whole[j][i]), scale[i % 2], sums[0][j][i]);
              whole[j][i] = 0;
            }
          }
        }
      }
    }
    copy_wait<0>();

    // ---- the warps' sums, in order ---------------------------------------------------------------
    float added[2] = {};
    if constexpr (Shape::kInteger) {
      // The high bytes' columns alone carry the correction.
      added[0] = __shfl_sync(0xFFFFFFFFu, correction, pair_row);
      added[1] = __shfl_sync(0xFFFFFFFFu, correction, pair_row + 1);
      if (pair_row >= 4) added[0] = added[1] = 0.0f;
    }
    float4 totals[kRowGroups] = {};
#pragma unroll
    for (int r = 0; r < kRowGroups; ++r) {
      __syncthreads();  // the rings, or the sums of the rows before, are done with
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float (&sum)[4] = sums[r][j];
        all_sums[depth * (kSmallSums / 4) + (column + j) * 32 + lane] =
            float4{sum[0] + added[0], sum[1] + added[1], sum[2] + added[0], sum[3] + added[1]};
      }
      __syncthreads();
#pragma unroll
      for (int d = 0; d < kDepthWarps; ++d)
        totals[r] = add(totals[r], all_sums[d * (kSmallSums / 4) + threadIdx.x]);
    }

    // ---- the stretches' sums, in order -----------------------------------------------------------
    bool complete = true;
    if (length < groups) {
      float4* const all_parts = reinterpret_cast<float4*>(scratch.parts) + threadIdx.x;
      const auto part_of = [&](int block) {
        // A block's stretch begins in the column block of its first slot; any other that it does not
        // have to itself is its last, and has the second.
        const int slot = block * share >= column_block * groups ? 0 : 1;
        return (static_cast<int64_t>(block) * 2 + slot) * kRowGroups * (kSmallSums / 4);
      };
      const int from = column_block * groups / share;
      const int to = ((column_block + 1) * groups - 1) / share;
#pragma unroll
      for (int r = 0; r < kRowGroups; ++r)
        __stcg(all_parts + part_of(blockIdx.x) + r * (kSmallSums / 4), totals[r]);
      __syncthreads();
      int* const flag = reinterpret_cast<int*>(shared + Layout::kFlag);
      if (threadIdx.x == 0)
        *flag = arrive(scratch.rotated.arrived + column_block) == static_cast<unsigned>(to - from);
      __syncthreads();
      complete = *flag != 0;
      if (complete) {
#pragma unroll
        for (int r = 0; r < kRowGroups; ++r) {
          totals[r] = float4{};
          // Eight loads at a time: each takes as long as a few hundred instructions.
          for (int block = from; block <= to; block += 8) {
            float4 part[8];
#pragma unroll
            for (int i = 0; i < 8; ++i)
              part[i] = block + i <= to
                            ? __ldcg(all_parts + part_of(block + i) + r * (kSmallSums / 4))
                            : float4{};
#pragma unroll
            for (int i = 0; i < 8; ++i) totals[r] = add(totals[r], part[i]);
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; complete && r < kRowGroups; ++r) {
      __syncthreads();
      reinterpret_cast<float4*>(block_sums)[threadIdx.x] = totals[r];
      __syncthreads();
      finish_column_block<kOperand == Operand::kBytes>(g, block_sums, scratch.rotated.row_scales,
                                                       column_block, r * 8);
    }
    __syncthreads();  // before the next column block writes over the sums
    at += length;
  }
}

// One rate's kernels; instantiated in small_k*.cu, one file a rate, so that they compile in parallel.
template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share,
                              cudaStream_t stream);

}  // namespace trellis::cuda
