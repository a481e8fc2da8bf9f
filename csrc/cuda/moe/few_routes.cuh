// Routed experts where routes are few: gate and up, or down. A step this short is made of waiting, so nobody waits who
// need not: every block sorts the routes by itself while their rows are rotated (few_routes.cu), takes an equal share of
// the output tiles (16 features, all of K) and leaves raw sums. Whoever reads sums finishes them: those of gate and up as
// rows for down (transform, activation, rotation), those of down as y (transform, routing weights).
//
// Eight warps share K, each with a ring of packed tiles of its own; their sums meet in shared memory.
#pragma once

#include "few_routes.h"
#include "products.cuh"

namespace trellis::cuda {

// Row blocks: what one pass over an expert's weights serves.
struct FewSorted {
  int row_blocks;
  int expert[kFewRoutes];
  uint8_t rows[kFewRoutes], route[kFewRoutes][8];
  // Their entries of the table, gate, up, down, where experts have one slice only.
  alignas(16) longlong2 kept[kFewRoutes][3];
};

// Neighbouring tiles of one matrix that are multiplied at a time. Lanes of the first warp make them ahead, since where
// they lie takes divisions and loads that would otherwise stand between any two of them.
struct FewPiece {
  const char* packed;  // of the first tile at k = 0
  uint32_t row_bytes;  // from one k tile to the next
  uint8_t tile_words, codebook;
  uint8_t count;     // tiles; 0 behind the block's last ones
  uint8_t rows;      // of the row block
  uint16_t inverse;  // of count, for row_of
  int16_t row_block;
  int slice, pass, first;  // pass: gate or up; first: of the matrix's tiles

  // Which row a sum is of, where rows have 16 * count each: exact for up to 1,024 sums.
  __device__ __forceinline__ int row_of(int sum) const { return sum / 16 * inverse >> 9; }
};
constexpr int kFewPieces = 8;  // that a block keeps
// Made before anything else; and after piece 0 and every so many more. By then their places have been read by all, and
// the first to be read of them is two meetings of the sums away.
constexpr int kFewFirstPieces = 3, kFewMorePieces = 4;
static_assert(kFewFirstPieces + kFewMorePieces <= kFewPieces);

// Shared memory of a block; what its rows need follows (FewRows).
struct FewShared {
  uint32_t rings[kExpertWarps][kFewStages * kFewStageBytes / 4];
  FewSorted sorted;
  FewPiece pieces[kFewPieces];
  int next_piece;  // the tile with which the next piece to be made begins
  int blocks;      // 128-blocks of K
  int most_rows;   // of a row block
};
static_assert(sizeof(FewShared) <= kFewFixedBytes);
static_assert(kFewRoutes <= 32, "a lane sorts a route");

__device__ __forceinline__ FewShared& few_shared() {
  extern __shared__ __align__(128) uint32_t few_memory[];
  return *reinterpret_cast<FewShared*>(few_memory);
}

struct FewRows {
  float* scales;  // [128-blocks][8]
  float* parts;   // [warps][rows][kFewPartFeatures]: their sums
  uint4* x;       // [terms][k tiles][rows][2]: a row's pieces (FewScratch::rows)

  __device__ explicit FewRows(FewShared& s)
      : scales(reinterpret_cast<float*>(reinterpret_cast<char*>(&s) + kFewFixedBytes)),
        parts(scales + s.blocks * 8),
        x(reinterpret_cast<uint4*>(parts + kExpertWarps * s.most_rows * kFewPartFeatures)) {}
};

// What there are of tiles in a launch, laid end to end: by row block, slice, matrix (gate, up), then feature.
template <bool kDown>
struct FewTiles {
  int of_matrix, blocks, passes;  // tiles; 128-blocks of K; matrices for a row block and slice

  __device__ explicit FewTiles(const Moe& m)
      : of_matrix(static_cast<int>((kDown ? m.hidden : m.inner) / 16)),
        blocks(static_cast<int>((kDown ? m.inner : m.hidden) / 128)),
        passes(!kDown && m.gate.suh.data != nullptr ? 2 : 1) {}
};

// Matrices are numbered as their tiles lie.
struct FewMatrix {
  int row_block, slice, pass;
  int which;  // of gate, up, down
};
template <bool kDown>
__device__ __forceinline__ FewMatrix few_matrix(const Moe& m, int number) {
  const int passes = FewTiles<kDown>(m).passes, slices = static_cast<int>(m.slices);
  const int sliced = passes == 2 ? number / 2 : number, pass = passes == 2 ? number % 2 : 0;
  const int row_block = slices == 1 ? sliced : sliced / slices;
  return {row_block, sliced - row_block * slices, pass, kDown ? 2 : passes == 1 ? 1 : pass};
}

// As in the table.
template <bool kDown>
__device__ __forceinline__ longlong2 few_entry(const Moe& m, const FewSorted& sorted, int number) {
  const FewMatrix matrix = few_matrix<kDown>(m, number);
  if (m.slices == 1) return sorted.kept[matrix.row_block][matrix.which];
  return __ldg(reinterpret_cast<const longlong2*>(m.table) +
               (matrix.which * m.experts + sorted.expert[matrix.row_block]) * m.slices +
               matrix.slice);
}

// How many tiles are multiplied at a time, of `left` that the block has of a matrix.
__device__ __forceinline__ int few_count(int tile_words, int left) {
  const int most = few_tiles_of(tile_words);
  // Two pieces of about four rather than one of six and a rest.
  const bool takes_most = left == most || left >= (most == kFewTiles ? most : most + 3);
  return takes_most ? most : left >= 4 ? 4 : left;
}

// Pieces `number` and on, a lane each of the first warp, as many as `made`: of a block whose tiles end before `stop`.
template <bool kDown>
__device__ __forceinline__ void make_few_pieces(const Moe& m, FewShared& s, int number, int made,
                                                int stop) {
  const int lane = threadIdx.x % 32;
  const FewTiles<kDown> tiles(m);
  int at = s.next_piece;
  __syncwarp();
  if (lane >= made) return;
  FewPiece piece = {};
  piece.tile_words = 64;
  int matrix = at / tiles.of_matrix, first = at - matrix * tiles.of_matrix;
  longlong2 entry = {};
  const auto count = [&] {
    if (at >= stop) return 0;
    return few_count(static_cast<int>(entry.y), min(stop - at, tiles.of_matrix - first));
  };
  if (at < stop) entry = few_entry<kDown>(m, s.sorted, matrix);
  for (int i = 0; i < lane && at < stop; ++i) {
    const int before = count();
    at += before, first += before;
    if (first < tiles.of_matrix) continue;
    ++matrix, first = 0;
    if (at < stop) entry = few_entry<kDown>(m, s.sorted, matrix);
  }
  if (at < stop) {
    const FewMatrix which = few_matrix<kDown>(m, matrix);
    piece.count = static_cast<uint8_t>(count());
    piece.tile_words = static_cast<uint8_t>(entry.y);
    piece.codebook = static_cast<uint8_t>(which.which == 2   ? m.down.codebook
                                          : which.which == 1 ? m.up.codebook
                                                             : m.gate.codebook);
    piece.row_bytes = static_cast<uint32_t>(tiles.of_matrix * piece.tile_words * 2);
    piece.packed = reinterpret_cast<const char*>(m.packed + entry.x) + first * piece.tile_words * 2;
    // 512 over it, rounded up.
    piece.inverse = static_cast<uint16_t>(1.0f + __fdividef(511.5f, piece.count));
    piece.row_block = static_cast<int16_t>(which.row_block);
    piece.rows = s.sorted.rows[which.row_block];
    piece.slice = which.slice, piece.pass = which.pass, piece.first = first;
  }
  s.pieces[(number + lane) % kFewPieces] = piece;
  if (lane == made - 1) s.next_piece = at + piece.count;
}

// A route is the row of its expert's row blocks that it is in their order, and row blocks are in the order of their
// first routes. For all threads of a block.
__device__ __forceinline__ void sort_few_routes(const Moe& m, int most_rows, FewSorted& sorted) {
  if (threadIdx.x < 32) {
    const int route = threadIdx.x, routes = static_cast<int>(m.tokens * m.top_k);
    const int64_t id = route < routes ? expert_of_route(m, route) : -1;
    const bool within = id >= 0 && id < m.experts;
    // Side by side, since each comes from memory.
    longlong2 kept[3] = {};
    if (within && m.slices == 1) {
#pragma unroll
      for (int which = 0; which < 3; ++which)
        kept[which] = __ldg(reinterpret_cast<const longlong2*>(m.table) + which * m.experts + id);
    }
    const int expert = within && m.slices == 1 ? (kept[2].y == 0 ? -1 : static_cast<int>(id))
                       : within                ? expert_of(m, route)
                                               : -1;
    const unsigned before = (1u << route) - 1;
    const unsigned same = __match_any_sync(0xFFFFFFFFu, expert);
    const int place = __popc(same & before);
    const bool leads = expert >= 0 && place % most_rows == 0;
    const unsigned leaders = __ballot_sync(0xFFFFFFFFu, leads);
    if (leads) {
      const int row_block = __popc(leaders & before);
      const int rows = min(__popc(same) - place, most_rows);
      sorted.expert[row_block] = expert;
      sorted.rows[row_block] = static_cast<uint8_t>(rows);
#pragma unroll
      for (int which = 0; which < 3; ++which) sorted.kept[row_block][which] = kept[which];
      unsigned left = same & ~before;
      for (int row = 0; row < rows; ++row, left &= left - 1)
        sorted.route[row_block][row] = static_cast<uint8_t>(__ffs(static_cast<int>(left)) - 1);
    }
    if (route == 0) sorted.row_blocks = __popc(leaders);
  }
  __syncthreads();
}

// The packed words of a warp's share of a segment.
struct FewCopies {
  const char* from;    // this lane's first 16 bytes
  uint32_t row_bytes;  // from one k tile to the next
  uint32_t bytes;      // of a k tile
  int groups;

  __device__ __forceinline__ FewCopies(const FewPiece& piece, int segment, int blocks) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int all = groups_of_segment(segment, blocks), first = first_group_of(warp, all);
    groups = piece.count == 0 ? 0 : first_group_of(warp + 1, all) - first;
    row_bytes = piece.row_bytes;
    bytes = static_cast<uint32_t>(piece.count * piece.tile_words * 2);
    from = piece.packed + lane * 16 +
           static_cast<int64_t>(segment * kSegmentBlocks * 8 + first * kExpertGroup) * row_bytes;
  }
};

// A group into the stage at `to`. kBytes: of a k tile at most, and from one to the next in a stage.
template <uint32_t kBytes>
__device__ __forceinline__ void copy_group(const char* from, const FewCopies& c, uint32_t to,
                                           uint64_t policy) {
  const uint32_t lane_bytes = threadIdx.x % 32 * 16;
#pragma unroll
  for (int k_tile = 0; k_tile < kExpertGroup; ++k_tile) {
#pragma unroll
    for (uint32_t byte = 0; byte < kBytes; byte += 512)
      if (lane_bytes + byte < c.bytes)
        copy_async_16(to + k_tile * kBytes + lane_bytes + byte,
                      from + k_tile * static_cast<uint64_t>(c.row_bytes) + byte, policy);
  }
}

// Starts the copies of the first groups, one for each stage of the ring.
__device__ __forceinline__ void fill_few(const FewCopies& c, int tile_words, uint32_t ring,
                                         uint64_t policy) {
  const uint32_t bytes = few_tiles_of(tile_words) * tile_words * 2,
                 lane_bytes = threadIdx.x % 32 * 16;
#pragma unroll 1
  for (int stage = 0; stage < kFewStages; ++stage) {
#pragma unroll 1
    for (int k_tile = 0; k_tile < kExpertGroup; ++k_tile) {
      const char* const from =
          c.from + static_cast<uint64_t>(c.row_bytes) * (stage * kExpertGroup + k_tile);
      const uint32_t to = ring + (stage * kExpertGroup + k_tile) * bytes + lane_bytes;
#pragma unroll 1
      for (uint32_t byte = 0; stage < c.groups && lane_bytes + byte < c.bytes; byte += 512)
        copy_async_16(to + byte, from + byte, policy);
    }
    copy_commit();
  }
}

// Multiplies kTiles tiles, of which the last may be nobody's: tiles are not told apart at run time, since branches
// between them would keep the instructions of one from hiding those of another. The first groups are in the ring or on
// their way, from `stage` on; the last ones make room for those that come after, so that the memory does not rest.
// Leaves the warp's sums of kept piece `number` and a segment among the parts, and returns where in the ring the next
// ones are. A function rather than inlined, since a kernel has one for each rate and codebook; so it is given little,
// which goes by registers.
template <int kTileWords, int kCodebook, bool kPacked, int kTerms, int kTiles>
__device__ __noinline__ uint32_t multiply_few(int number, int segment, uint32_t stage) {
  constexpr uint32_t kTileBytes = kTileWords * 2,
                     kKTileBytes = few_tiles_of(kTileWords) * kTileBytes;
  constexpr uint32_t kStageBytes = kExpertGroup * kKTileBytes;
  const int lane = static_cast<int>(hold(threadIdx.x % 32));
  Window<kTileWords> window(lane);
  for (int& index : window.index) index = static_cast<int>(hold(index * 4u));  // bytes from here on
  const uint32_t lane_bytes = hold(lane * 16u);
  const Hash hash = hash_for<kCodebook>();
  const PowersOfTwo powers = held_powers_of_two();
  FewShared& s = few_shared();
  const FewPiece& piece = s.pieces[number];
  const int blocks = s.blocks, warp = threadIdx.x / 32;
  const bool is_last = segment + 1 == segments_of(blocks);
  const FewPiece& after = is_last ? s.pieces[(number + 1) % kFewPieces] : piece;
  const int segment_after = is_last ? 0 : segment + 1;
  const uint32_t ring = shared_address(s.rings[warp]);
  const uint64_t policy = evict_first();

  const int rows = piece.rows;
  const int first = first_group_of(warp, groups_of_segment(segment, blocks));
  const FewRows of_rows(s);
  const float* const segment_scales = of_rows.scales + segment * kSegmentBlocks * 8;
  const uint32_t x_row_bytes = static_cast<uint32_t>(rows) * 32;
  const uint32_t x_terms = static_cast<uint32_t>(blocks * 8 * rows * 32);
  // This lane's pair of fragments. Columns of the product that no row has may be anything.
  uint32_t x_at =
      shared_address(of_rows.x) + lane % 4 * 8 +
      ((segment * kSegmentBlocks * 8 + first * kExpertGroup) * rows + min(lane / 4, rows - 1)) * 32;

  FewCopies next(piece, segment, blocks);
  const char* from =
      next.from + static_cast<uint64_t>(next.row_bytes) * (kFewStages * kExpertGroup);
  const int groups = next.groups;
  int to_copy = groups - kFewStages;
  const bool follows =
      to_copy >= 0 && after.tile_words == kTileWords;  // in the same ring, stage after stage
  bool to_follow = follows;

  float sums[1][kTiles][4] = {};
  RowUnits units;
  for (int i = 0; i < groups; ++i) {
    const int group = first + i;
    if (i == 0 || group % kBlockGroups == 0) {  // a block of 128 inputs begins
      const float* const scales = segment_scales + group / kBlockGroups * 8;
      units.begin_block(i == 0, lane, *reinterpret_cast<const float2*>(scales + lane % 4 * 2),
                        *reinterpret_cast<const float2*>(scales + lane / 8 * 2), sums[0]);
    }
    copy_wait<kFewStages - 1>();
    __syncwarp();
#pragma unroll
    for (int k_tile = 0; k_tile < kExpertGroup; ++k_tile) {
      uint2 x[kTerms];
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
        x[term] = units.shrunk(load_shared_pair(x_at + term * x_terms));
      x_at += x_row_bytes;
      uint32_t own[4] = {};
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
        multiply_tile<kTileWords, kCodebook, kPacked>(stage + k_tile * kKTileBytes + j * kTileBytes,
                                                      j, own, window, lane_bytes, hash, powers, x,
                                                      sums);
    }
    __syncwarp();  // everybody has read the stage before it is filled again
    if (to_copy == 0 && to_follow) {
      next = FewCopies(after, segment_after, blocks);
      from = next.from, to_copy = next.groups;
      to_follow = false;
    }
    if (to_copy > 0) {
      --to_copy;
      copy_group<kKTileBytes>(from, next, stage, policy);
      from += static_cast<uint64_t>(next.row_bytes) * kExpertGroup;
    }
    copy_commit();
    stage = stage == ring + (kFewStages - 1) * kStageBytes ? ring : stage + kStageBytes;
  }
  if (!follows) {
    stage = ring;
    fill_few(FewCopies(after, segment_after, blocks), after.tile_words, ring, policy);
  }

  float* const parts = of_rows.parts + warp * rows * kFewPartFeatures;
  __syncthreads();  // whoever still read what was there before has done so
  const int row = lane % 4 * 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (row + i >= rows) break;
    float* const to = parts + (row + i) * kFewPartFeatures + lane / 4;
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
      to[j * 16] = sums[0][j][i] * (i == 0 ? units.sums.x : units.sums.y);
      to[j * 16 + 8] = sums[0][j][i + 2] * (i == 0 ? units.sums.x : units.sums.y);
    }
  }
  return stage;
}

// Of a single tile, two: the second is nobody's.
template <bool kPacked, int kTerms>
__device__ __forceinline__ uint32_t multiply_few_any(int number, int segment, uint32_t stage) {
  const FewPiece& piece = few_shared().pieces[number];
  return with_rate(piece.tile_words, [&](auto words) {
    return with_codebook<words.value>(piece.codebook, [&](auto book) {
      constexpr int kTileWords = decltype(words)::value, kCodebook = decltype(book)::value;
      constexpr bool kAsPacked = kPacked || kCodebook == kMul1;
      const auto multiply = [&](auto tiles) {
        constexpr int kTiles = decltype(tiles)::value;
        return multiply_few<kTileWords, kCodebook, kAsPacked, kTerms, kTiles>(number, segment,
                                                                              stage);
      };
      constexpr int kMost = few_tiles_of(kTileWords);
      const int count = piece.count;
      if constexpr (kMost > 4)
        if (count == kMost) return multiply(std::integral_constant<int, kMost>{});
      if (count == 4) return multiply(std::integral_constant<int, 4>{});
      if (count == 3) return multiply(std::integral_constant<int, 3>{});
      return multiply(std::integral_constant<int, 2>{});
    });
  });
}

// kExact: values as their definition rounds them, and x in two terms. FP16 and FP32 results need it, since three
// layers' errors add up; BF16 ones are rounded more than that. `most_rows`: of a row block.
template <bool kDown, bool kExact>
__global__ void __launch_bounds__(kExpertWarps * 32, 2)
    few_routes_kernel(const __grid_constant__ Moe m, const FewScratch scratch,
                      const int most_rows) {
  constexpr int kTerms = kExact ? 2 : 1;
  FewShared& s = few_shared();
  const FewTiles<kDown> tiles(m);
  if (threadIdx.x == 0) s.blocks = tiles.blocks, s.most_rows = most_rows;

  // What is read before the wait has been there since the op's first kernel, the rotation, passed its own: inputs. Down
  // sorts them again rather than wait for what gate and up have sorted.
  let_next_kernel_start();
  FewSorted& sorted = s.sorted;
  sort_few_routes(m, most_rows, sorted);
  const int total = sorted.row_blocks * static_cast<int>(m.slices) * tiles.passes * tiles.of_matrix;
  const int share = (total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x);
  const int begin = min(static_cast<int>(blockIdx.x) * share, total);
  const int stop = min(begin + share, total);
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) s.next_piece = begin;
    __syncwarp();
    make_few_pieces<kDown>(m, s, 0, kFewFirstPieces, stop);
  }
  __syncthreads();
  uint32_t stage = shared_address(s.rings[threadIdx.x / 32]);
  fill_few(FewCopies(s.pieces[0], 0, tiles.blocks), s.pieces[0].tile_words, stage, evict_first());
  wait_for_previous_kernel();

  const FewRows of_rows(s);
  const int segments = segments_of(tiles.blocks);
  const int64_t slices = m.slices;
  const bool two_rotations = !kDown && !one_rotation(m);
  int prepared = -1;
  for (int number = 0; s.pieces[number % kFewPieces].count > 0; ++number) {
    const FewPiece& piece = s.pieces[number % kFewPieces];
    const int rows = piece.rows, row_block = piece.row_block, slice = piece.slice;
    const uint8_t* const routes = sorted.route[row_block];
    const int rotation = two_rotations ? piece.pass : 0;
    const int wanted = (row_block * static_cast<int>(slices) + slice) * 2 + rotation;
    if (wanted != prepared) {
      prepared = wanted;
      // What was there before has been read: sums have met since.
      const int row_pieces = tiles.blocks * 16 * kTerms;
      for (int row = 0; row < rows; ++row) {
        const int64_t place = (routes[row] * slices + slice) * (two_rotations ? 2 : 1) + rotation;
        const uint4* const from = scratch.rows[kDown] + place * row_pieces;
        for (int i = threadIdx.x; i < row_pieces; i += kExpertWarps * 32)
          of_rows.x[(i / 2 * rows + row) * 2 + i % 2] = __ldcg(from + i);
        const float* const scales = scratch.scales[kDown] + place * tiles.blocks;
        for (int i = threadIdx.x; i < tiles.blocks; i += kExpertWarps * 32)
          of_rows.scales[i * 8 + row] = __ldcg(scales + i);
      }
      __syncthreads();
    }

    float held[kFewHeld] = {};  // this thread's sums
    for (int segment = 0; segment < segments; ++segment) {
      stage = multiply_few_any<kExact, kTerms>(number % kFewPieces, segment, stage);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kFewHeld; ++i) {
        const int own = threadIdx.x + i * kExpertWarps * 32, row = piece.row_of(own);
        if (row >= rows) break;
        const float* const part =
            of_rows.parts + row * kFewPartFeatures + own - row * (piece.count * 16);
        float sum = part[0];
#pragma unroll
        for (int d = 1; d < kExpertWarps; ++d) sum += part[d * rows * kFewPartFeatures];
        held[i] = segment == 0 ? sum : held[i] + sum;
      }
    }
    if (number % kFewMorePieces == 0 && threadIdx.x < 32)
      make_few_pieces<kDown>(m, s, number + kFewFirstPieces, kFewMorePieces, stop);
#pragma unroll
    for (int i = 0; i < kFewHeld; ++i) {
      const int own = threadIdx.x + i * kExpertWarps * 32, row = piece.row_of(own);
      if (row >= rows) break;
      const int64_t of_route = (routes[row] * slices + slice) * tiles.passes + piece.pass;
      (kDown ? scratch.results : scratch.sums)[(of_route * tiles.of_matrix + piece.first) * 16 +
                                               own - row * (piece.count * 16)] = held[i];
    }
  }
}

// Both products; instantiated in few_routes_*.cu.
template <bool kExact>
cudaError_t launch_few_products(bool down, const Moe& m, const FewScratch& scratch,
                                const FewPlan& plan, cudaStream_t stream);

}  // namespace trellis::cuda
