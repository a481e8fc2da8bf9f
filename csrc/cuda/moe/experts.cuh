// The products of routed experts, gate and up with the activation or down, for up to 16 rows of an expert
// at a time.
//
// The pieces of all units (shares.cuh) are dealt to the thread blocks; how many there are is known on the device
// alone. In a piece the warps share K, each with a ring of packed tiles and fragments of its own; their sums meet
// in shared memory. A unit that lies in the shares of several blocks is finished by whichever comes last. Sums are
// added in an order that depends on K alone, neither on the number of rows nor on who adds them.
//
// Weights are the A operand. Rows are FP16 with one scale for each 128 inputs, so no activation is too large
// and no block of outliers costs the others anything.
#pragma once

#include "products.cuh"
#include "shares.cuh"

namespace trellis::cuda {

constexpr int kUnitQuads = kExpertWarps * 32;  // quads of sums of eight rows: one a thread
__host__ __device__ constexpr int expert_stages(int tile_words) { return tile_words <= 64 ? 3 : 2; }

// A segment of a unit, as all warps of a block take it. Warp 0 makes them ahead, a lane each, since where a segment lies
// takes divisions and loads that would otherwise stand between any two of them.
struct Piece {
  const char* tiles;    // packed words of the unit's columns at the segment's first k tile
  const char* x;        // fragments there
  const float* scales;  // of the segment's first 128-block
  uint32_t row_bytes;   // from one k tile to the next
  uint8_t tile_words, codebook;
  uint8_t groups;  // that the warps share; 0 behind the block's last segment
  uint8_t rows;    // of the row block
  int unit, segment, matrix, row_block, slice, column_block;
};
constexpr int kKeptPieces = 16;  // of a block; half of them are made at a time

// kTerms: FP16 numbers whose sum is x.
template <int kRowGroups, int kTerms>
struct ExpertShape {
  static constexpr uint32_t kX = kRowGroups * kTerms * 256;  // bytes of a k tile's fragments
  // A stage of a warp's ring holds a group's packed words, then its fragments.
  __host__ __device__ static constexpr uint32_t stage_bytes(int tile_words) {
    return kExpertGroup * (8 * tile_words * 2 + kX);
  }
  static constexpr uint32_t kRing = stage_bytes(64) * 3 > stage_bytes(128) * 2
                                        ? stage_bytes(64) * 3
                                        : stage_bytes(128) * 2;
  // Of a warp's sums that meet at a time. Blocks of eight rows have half of the features of them, so that GPUs with
  // little shared memory can run these at least.
  static constexpr int kQuads = kRowGroups == 1 ? kUnitQuads / 2 : kUnitQuads;
  // Shared memory: the rings, the sums that meet, pieces, shares, a flag.
  static constexpr int kParts = kExpertWarps * kRing, kPieces = kParts + kExpertWarps * kQuads * 16;
  static constexpr int kNear = kPieces + kKeptPieces * static_cast<int>(sizeof(Piece));
  static constexpr int kFlag = kNear + (2 * Shares<false>::kNear + 1) * 4;
  static constexpr int kShared = kFlag + 4;  // bytes
  // That a multiprocessor of sm_90 has room for.
  static constexpr int kBlocks = kShared <= 113 * 1024 ? 2 : 1;
};

__device__ __forceinline__ char* expert_shared() {
  extern __shared__ __align__(128) char expert_memory[];
  return expert_memory;
}
template <typename Shape>
__device__ __forceinline__ Piece* kept_pieces() {
  return reinterpret_cast<Piece*>(expert_shared() + Shape::kPieces);
}
template <typename Shape>
__device__ __forceinline__ float4* meeting_place() {
  return reinterpret_cast<float4*>(expert_shared() + Shape::kParts);
}
template <typename Shape>
__device__ __forceinline__ uint32_t ring_of_warp() {
  return shared_address(expert_shared()) + threadIdx.x / 32 * Shape::kRing;
}

// What a warp does of a piece.
struct Stretch {
  const char* tiles;  // at the warp's first k tile
  const char* x;
  uint32_t row_bytes;
  int first, last;  // groups, counted from the segment's beginning
};
template <typename Shape>
__device__ __forceinline__ Stretch stretch_of(const Piece& piece) {
  const int warp = threadIdx.x / 32;
  Stretch s;
  s.first = first_group_of(warp, piece.groups), s.last = first_group_of(warp + 1, piece.groups);
  s.row_bytes = piece.row_bytes;
  s.tiles = piece.tiles + static_cast<uint64_t>(s.row_bytes) * (s.first * kExpertGroup);
  s.x = piece.x + s.first * kExpertGroup * static_cast<int>(Shape::kX);
  return s;
}

// Copies a group to `to`: its weights, which no launch in front writes, its x, or both. kUnroll: at most; what
// runs seldom is better short.
template <typename Shape, int kUnroll>
__device__ __forceinline__ void fetch_group(const char* tiles, uint32_t row_bytes, int tile_words,
                                            const char* x, uint32_t to, uint64_t policy,
                                            bool weights = true, bool fragments = true) {
  const uint32_t lane_bytes = threadIdx.x % 32 * 16;
  const uint32_t k_tile_bytes = 16 * tile_words;
  const auto fetch_k_tile = [&](uint32_t byte) {
    if (lane_bytes + byte < k_tile_bytes)
      copy_async_16(to + lane_bytes + byte, tiles + lane_bytes + byte, policy);
  };
#pragma unroll(kUnroll)
  for (int i = 0; i < kExpertGroup; ++i) {
#pragma unroll(kUnroll)
    for (uint32_t byte = 0; weights && byte < k_tile_bytes; byte += 512) fetch_k_tile(byte);
    to += k_tile_bytes;
    tiles += row_bytes;
  }
#pragma unroll(kUnroll)
  for (uint32_t byte = 0; fragments && byte < kExpertGroup * Shape::kX; byte += 512)
    copy_async_16(to + lane_bytes + byte, x + lane_bytes + byte);
}

// Starts the copies of a piece's first groups, one for each stage of the warp's ring.
template <typename Shape>
__device__ __forceinline__ void fill_ring(const Piece& piece, uint64_t policy, bool weights = true,
                                          bool fragments = true) {
  const Stretch s = stretch_of<Shape>(piece);
  const int tile_words = piece.tile_words;
  const char *tiles = s.tiles, *x = s.x;
  uint32_t to = ring_of_warp<Shape>();
#pragma unroll 1
  for (int stage = 0; stage < expert_stages(tile_words); ++stage) {
    if (s.first + stage < s.last)
      fetch_group<Shape, 1>(tiles, s.row_bytes, tile_words, x, to, policy, weights, fragments);
    if (fragments) copy_commit();
    tiles += static_cast<uint64_t>(s.row_bytes) * kExpertGroup;
    x += kExpertGroup * Shape::kX;
    to += Shape::stage_bytes(tile_words);
  }
}

// Adds up kept piece `number`, whose first groups are in the ring or on their way from `stage` on. Its last groups make
// room for those of the piece that comes next, so that the memory does not rest. A function rather than inlined, since
// a kernel has one for each rate and codebook. `sums_of_unit`: this thread's quads of each eight rows, in its local
// memory, since a call leaves the caller no registers; added to, or, where the piece is the `first`, set. Returns where
// in the ring the next piece begins.
template <int kTileWords, int kCodebook, bool kPacked, int kTerms, int kRowGroups>
__device__ __noinline__ uint32_t multiply_piece(int number, uint32_t stage, float4* sums_of_unit,
                                                bool first) {
  using Shape = ExpertShape<kRowGroups, kTerms>;
  const Piece& piece = kept_pieces<Shape>()[number];
  const Piece& after = kept_pieces<Shape>()[(number + 1) % kKeptPieces];
  const uint32_t ring = ring_of_warp<Shape>();
  float4* const parts = meeting_place<Shape>();
  const uint64_t policy = evict_first();
  const Stretch s = stretch_of<Shape>(piece);
  constexpr uint32_t kTileBytes = kTileWords * 2, kKTileBytes = 8 * kTileBytes;
  constexpr uint32_t kPackedBytes = kExpertGroup * kKTileBytes, kX = Shape::kX;
  constexpr uint32_t kStageBytes = Shape::stage_bytes(kTileWords);
  constexpr int kStages = expert_stages(kTileWords);
  constexpr int kRows = kRowGroups * 8;
  constexpr int kLoads = kTerms * kRowGroups;

  const int lane = threadIdx.x % 32;
  Window<kTileWords> window(lane);
  for (int& index : window.index) index = static_cast<int>(hold(index * 4u));  // bytes from here on
  const uint32_t lane_bytes = hold(lane * 16u);
  const Hash hash = hash_for<kCodebook>();
  const PowersOfTwo powers = held_powers_of_two();

  const char* source = s.tiles + static_cast<int64_t>(kStages) * kExpertGroup * s.row_bytes;
  const char* x_source = s.x + kStages * kExpertGroup * kX;
  uint32_t row_bytes = s.row_bytes;
  int to_fetch = s.last - s.first - kStages;
  bool follows =
      to_fetch >= 0 && after.tile_words == kTileWords;  // in the same ring, stage after stage
  const bool goes_on = follows;

  float sums[kRowGroups][8][4] = {};
  RowUnits units[kRowGroups];
  for (int group = s.first; group < s.last; ++group) {
    if (group == s.first || group % kBlockGroups == 0) {  // a block of 128 inputs begins
      const float* const scales = piece.scales + group / kBlockGroups * kRows;
#pragma unroll
      for (int r = 0; r < kRowGroups; ++r)
        units[r].begin_block(group == s.first, lane,
                             load_global_pair(scales + r * 8 + lane % 4 * 2),
                             load_global_pair(scales + r * 8 + lane / 8 * 2), sums[r]);
    }
    copy_wait<kStages - 1>();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kExpertGroup; ++i) {
      uint2 x[kLoads];
#pragma unroll
      for (int r = 0; r < kLoads; ++r)
        x[r] = units[r % kRowGroups].shrunk(
            load_shared_pair(stage + kPackedBytes + i * kX + r * 256 + lane * 8));
      uint32_t own[4] = {};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        multiply_tile<kTileWords, kCodebook, kPacked>(stage + i * kKTileBytes + j * kTileBytes, j,
                                                      own, window, lane_bytes, hash, powers, x,
                                                      sums);
      }
    }
    __syncwarp();  // everybody has read the stage before it is filled again
    if (to_fetch == 0 && follows) {
      const Stretch next = stretch_of<Shape>(after);
      source = next.tiles, x_source = next.x, row_bytes = next.row_bytes;
      to_fetch = next.last - next.first;
      follows = false;
    }
    if (to_fetch > 0) {
      --to_fetch;
      fetch_group<Shape, 8>(source, row_bytes, kTileWords, x_source, stage, policy);
      source += static_cast<uint64_t>(row_bytes) * kExpertGroup;
      x_source += kExpertGroup * kX;
    }
    copy_commit();
    stage = stage == ring + (kStages - 1) * kStageBytes ? ring : stage + kStageBytes;
  }
  if (!goes_on) {
    stage = ring;
    fill_ring<Shape>(after, policy);
  }

  constexpr int kQuads = Shape::kQuads, kParts = kUnitQuads / kQuads;
  const int warp = threadIdx.x / 32, quad = threadIdx.x % kQuads;
#pragma unroll
  for (int r = 0; r < kRowGroups; ++r) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      __syncthreads();  // whoever still read what was there before has done so
#pragma unroll
      for (int j = 0; j < 8 / kParts; ++j) {
        const float (&sum)[4] = sums[r][part * (8 / kParts) + j];
        parts[warp * kQuads + j * 32 + lane] =
            float4{sum[0] * units[r].sums.x, sum[1] * units[r].sums.y, sum[2] * units[r].sums.x,
                   sum[3] * units[r].sums.y};
      }
      __syncthreads();
      if (static_cast<int>(threadIdx.x) / kQuads != part) continue;
      float4 sum = parts[quad];
#pragma unroll
      for (int d = 1; d < kExpertWarps; ++d) sum = add(sum, parts[d * kQuads + quad]);
      sums_of_unit[r] = first ? sum : add(sums_of_unit[r], sum);
    }
  }
  return stage;
}

template <bool kPacked, int kTerms, int kRowGroups>
__device__ __forceinline__ uint32_t multiply_any(int number, uint32_t stage, float4* sums_of_unit,
                                                 bool first) {
  const Piece& piece = kept_pieces<ExpertShape<kRowGroups, kTerms>>()[number];
  return with_rate(piece.tile_words, [&](auto tile_words) {
    return with_codebook<tile_words.value>(piece.codebook, [&](auto codebook) {
      constexpr int kTileWords = decltype(tile_words)::value, kCodebook = decltype(codebook)::value;
      constexpr bool kAsPacked = kPacked || kCodebook == kMul1;
      return multiply_piece<kTileWords, kCodebook, kAsPacked, kTerms, kRowGroups>(
          number, stage, sums_of_unit, first);
    });
  });
}

// ---- the kernel ----------------------------------------------------------------------------------
// Piece `at` of all, if it is one of [begin, stop).
template <bool kDown, typename Shape>
__device__ __forceinline__ Piece piece_at(const Moe& m, const MoeScratch& s,
                                          const Units<kDown>& units, int at, int begin, int stop) {
  Piece piece = {};
  piece.tile_words = 16;
  if (at >= stop) return piece;
  const int slices = static_cast<int>(m.slices);
  piece.unit = at / units.pieces;
  piece.segment = at - piece.unit * units.pieces;
  const int pass = piece.segment / units.segments, of_pass = piece.segment - pass * units.segments;
  const int sliced = piece.unit / units.column_blocks;
  piece.column_block = piece.unit - sliced * units.column_blocks;
  piece.row_block = sliced / slices;
  piece.slice = sliced - piece.row_block * slices;
  const int which = units.which(pass);
  const longlong2 matrix = __ldcg(s.matrices + sliced * 3 + which);
  piece.rows = static_cast<uint8_t>(__ldcg(s.rows + piece.row_block));
  piece.matrix = __ldcg(s.expert + piece.row_block) * slices + piece.slice;
  piece.tile_words = static_cast<uint8_t>(matrix.y);
  piece.codebook = static_cast<uint8_t>(kDown        ? m.down.codebook
                                        : which == 0 ? m.gate.codebook
                                                     : m.up.codebook);
  piece.groups = static_cast<uint8_t>(groups_of_segment(of_pass, units.blocks));
  const int first_block = of_pass * kSegmentBlocks, tile_bytes = piece.tile_words * 2;
  piece.row_bytes = static_cast<uint32_t>(units.column_blocks * 8 * tile_bytes);
  piece.tiles = reinterpret_cast<const char*>(m.packed + matrix.x) +
                static_cast<int64_t>(first_block) * 8 * piece.row_bytes +
                piece.column_block * 8 * tile_bytes;
  const int64_t block = (!kDown && !one_rotation(m) ? sliced * 2 + pass : sliced) *
                            static_cast<int64_t>(units.blocks) +
                        first_block;
  piece.x = reinterpret_cast<const char*>(kDown ? s.inner : s.x) + block * 8 * Shape::kX;
  piece.scales = (kDown ? s.inner_scales : s.x_scales) + block * s.row_groups * 8;
  if (piece.segment > 0 && at > begin) return piece;
  // Vectors that the unit's last step will want: else it would wait for memory.
  const int64_t feature = piece.column_block * 128;
  const auto want = [&](const Stack& vectors) {
    prefetch(vector_of(vectors, piece.matrix) + feature);
    prefetch(vector_of(vectors, piece.matrix) + feature + 64);
  };
  want(kDown ? m.down.svh : m.up.svh);
  if (!kDown) want(m.down.suh);
  if (units.passes == 2) want(m.gate.svh);
  return piece;
}

// kExact: values as their definition rounds them, and x in two terms. FP16 and FP32 results need it, since
// three layers' errors add up; BF16 ones are rounded more than that.
template <bool kDown, bool kExact, int kRowGroups>
__global__ void __launch_bounds__(kExpertWarps * 32,
                                  ExpertShape<kRowGroups, kExact ? 2 : 1>::kBlocks)
    expert_kernel(const Moe m, const MoeScratch s) {
  constexpr int kRows = kRowGroups * 8;
  constexpr int kTerms = kExact ? 2 : 1;
  using Shape = ExpertShape<kRowGroups, kTerms>;
  constexpr int kSums = kRowGroups * kUnitQuads;
  Piece* const pieces = kept_pieces<Shape>();
  float4* const parts = meeting_place<Shape>();
  int* const flag = reinterpret_cast<int*>(expert_shared() + Shape::kFlag);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const Units<kDown> units(m);
  // Down may start when all of gate and up have passed this wait: the sort is done by then, and what it left
  // is all that down needs to fetch its first weights.
  if constexpr (!kDown) wait_for_previous_kernel();
  let_next_kernel_start();
  const Shares<kDown> shares(m, s, units, reinterpret_cast<int*>(expert_shared() + Shape::kNear));
  __syncthreads();
  const int block = static_cast<int>(blockIdx.x);
  const int begin = shares.begin(block), stop = shares.begin(block + 1);
  unsigned* const arrived = kDown ? s.arrived_hidden : s.arrived_inner;

  // Half of the kept ones, from piece `first` on. For all threads.
  const auto make_pieces = [&](int first) {
    const int at = first + static_cast<int>(threadIdx.x);
    if (at < first + kKeptPieces / 2)
      pieces[(at - begin) % kKeptPieces] = piece_at<kDown, Shape>(m, s, units, at, begin, stop);
  };
  make_pieces(begin);
  __syncthreads();

  const uint64_t policy = evict_first();
  fill_ring<Shape>(pieces[0], policy, true, false);
  if constexpr (kDown) wait_for_previous_kernel();
  fill_ring<Shape>(pieces[0], policy, false, true);
  uint32_t stage = ring_of_warp<Shape>();
  float4 held[2 * kRowGroups];  // this thread's quads of the unit's sums, of gate and of up
  for (int at = begin; at < stop; ++at) {
    const int number = static_cast<unsigned>(at - begin) % kKeptPieces;
    const Piece& piece = pieces[number];
    const int unit = piece.unit, segment = piece.segment;
    const int pass = segment < units.segments ? 0 : 1;
    const bool whole = begin <= unit * units.pieces && (unit + 1) * units.pieces <= stop;
    stage = multiply_any<kExact, kTerms, kRowGroups>(number, stage, held + pass * kRowGroups,
                                                     !whole || segment == pass * units.segments);
    // Nobody reads the other half any more, since the sums have met.
    if (number % (kKeptPieces / 2) == 0) make_pieces(at + kKeptPieces / 2);

    const auto part_of = [&](int block, int of_segment) {
      // A block's share begins in the unit of its first place for parts; any other that it does not have to itself
      // is its last, and has the second.
      const int place = shares.begin(block) >= unit * units.pieces ? 0 : 1;
      return reinterpret_cast<float4*>(s.parts) +
             ((static_cast<int64_t>(block) * 2 + place) * units.pieces + of_segment) * kSums +
             threadIdx.x;
    };
    if (!whole) {
#pragma unroll
      for (int r = 0; r < kRowGroups; ++r)
        __stcg(part_of(block, segment) + r * kUnitQuads, held[pass * kRowGroups + r]);
    }
    if (segment + 1 < units.pieces && at + 1 < stop) continue;
    __syncthreads();

    if (!whole) {
      if (threadIdx.x == 0) {
        const int blocks = shares.blocks_of(unit * units.pieces, (unit + 1) * units.pieces);
        *flag = arrive(arrived + unit) + 1 == static_cast<unsigned>(blocks);
      }
      __syncthreads();
      const bool last_to_come = *flag != 0;
      __syncthreads();
      if (!last_to_come) continue;
      for (int of_pass = 0; of_pass < units.passes; ++of_pass) {
#pragma unroll
        for (int r = 0; r < kRowGroups; ++r) {
          float4 sum;
          for (int i = 0; i < units.segments; ++i) {
            const int of_segment = of_pass * units.segments + i;
            const int whose = shares.block_of(unit * units.pieces + of_segment);
            const float4 part = __ldcg(part_of(whose, of_segment) + r * kUnitQuads);
            sum = i == 0 ? part : add(sum, part);
          }
          held[of_pass * kRowGroups + r] = sum;
        }
      }
    }
    for (int i = 0; i < units.passes * kRowGroups; ++i)
      parts[i * kUnitQuads + threadIdx.x] = held[i];
    __syncthreads();
    // ---- the unit's sums are complete: a warp finishes a row ---------------------------------------
    const int column_block = piece.column_block, rows = piece.rows;
    const int64_t matrix = piece.matrix, slices = m.slices;
    const int feature = column_block * 128 + lane * 4;
    for (int row = warp; row < rows; row += kExpertWarps) {
      const auto sums_of = [&](int of_pass, float (&z)[4]) {
        const float* const sums =
            reinterpret_cast<const float*>(parts + of_pass * kSums + row / 8 * kUnitQuads);
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = sums[sum_index(row % 8, lane * 4 + i)];
      };
      float u[4], g[4] = {};
      if constexpr (kDown) {
        sums_of(0, u);
        finish_linear(m.down, matrix, feature, u);
        const int64_t slot = static_cast<int64_t>(piece.row_block) * kRows + row;
        *reinterpret_cast<float4*>(s.results + (slot * slices + piece.slice) * m.hidden + feature) =
            float4{u[0], u[1], u[2], u[3]};
      } else {
        sums_of(units.passes - 1, u);
        if (units.passes == 2) sums_of(0, g);
        finish_inner(m, matrix, feature, g, u);
        float suh[4];
        load_scales(vector_of(m.down.suh, matrix), column_block, suh);
        const int64_t first_block = (piece.row_block * slices + piece.slice) * units.column_blocks;
        write_fragments(u, suh, s.inner + first_block * 8 * kTerms * kRowGroups * 64,
                        s.inner_scales + first_block * kRows, column_block, row, kRowGroups,
                        kTerms);
      }
    }
  }
}

// Both products for one number of rows; instantiated in experts_*.cu.
template <int kRowGroups, bool kExact>
cudaError_t launch_experts(bool down, const Moe& m, const MoeScratch& scratch, cudaStream_t stream);

}  // namespace trellis::cuda
