// The products of routed experts, gate and up with the activation or down, for up to 16 rows of an expert
// at a time.
//
// A unit is a row block's 128 output features of one slice: its gate and up (or down alone), each cut into
// segments of K. The segments of all units are laid end to end and dealt to the thread blocks in equal
// stretches; how many there are is known on the device alone. In a segment the warps share K, each with a ring
// of packed tiles and fragments of its own; their sums meet in shared memory. A unit that lies in several
// stretches is finished by whichever block comes last. Sums are added in an order that depends on K alone,
// neither on the number of rows nor on who adds them.
//
// Weights are the A operand. Rows are FP16 with one scale for each 128 inputs, so no activation is too large
// and no block of outliers costs the others anything.
#pragma once

#include "products.cuh"

namespace trellis::cuda {

constexpr int kUnitQuads = kExpertWarps * 32;  // quads of sums of eight rows: one a thread
// Descriptors that a block keeps, of its first units, so that no segment waits for its own.
constexpr int kKeptMatrices = 48;
__host__ __device__ constexpr int expert_stages(int tile_words) { return tile_words <= 64 ? 3 : 2; }

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
  // Bytes of shared memory: the rings, the sums that meet, descriptors, a flag.
  static constexpr int kShared = kExpertWarps * (kRing + kQuads * 16) + kKeptMatrices * 16 + 16;
  // That a multiprocessor of sm_90 has room for.
  static constexpr int kBlocks = kShared <= 113 * 1024 ? 2 : 1;
};

// What a warp does of a segment.
struct Stretch {
  const char* tiles;    // packed words: the warp's columns at its first k tile
  const char* x;        // fragments at its first k tile
  const float* scales;  // of the segment's first 128-block
  uint32_t row_bytes;   // from one k tile to the next
  int tile_words, codebook;
  int first, last;  // groups, counted from a 128-block's beginning
};

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

// Starts the copies of a stretch's first groups, one for each stage of the ring.
template <typename Shape>
__device__ __forceinline__ void fill_ring(const Stretch& s, uint32_t ring, uint64_t policy,
                                          bool weights = true, bool fragments = true) {
  const char *tiles = s.tiles, *x = s.x;
#pragma unroll 1
  for (int stage = 0; stage < expert_stages(s.tile_words); ++stage) {
    if (s.first + stage < s.last)
      fetch_group<Shape, 1>(tiles, s.row_bytes, s.tile_words, x, ring, policy, weights, fragments);
    if (fragments) copy_commit();
    tiles += static_cast<uint64_t>(s.row_bytes) * kExpertGroup;
    x += kExpertGroup * Shape::kX;
    ring += Shape::stage_bytes(s.tile_words);
  }
}

template <int kRowGroups>
struct Summed {
  float4 quads[kRowGroups];  // this thread's
  uint32_t stage;            // where in the ring the next stretch begins
};

// Adds up a segment, whose first groups are in the ring or on their way from `stage` on. Its last groups make
// room for those of the stretch that comes next, so that the memory does not rest. A function rather than
// inlined, since a kernel has one for each rate and codebook.
template <int kTileWords, int kCodebook, bool kPacked, int kTerms, int kRowGroups>
__device__ __noinline__ Summed<kRowGroups> multiply_stretch(const Stretch s, const Stretch after,
                                                            uint32_t ring, uint32_t stage,
                                                            uint64_t policy, float4* parts) {
  using Shape = ExpertShape<kRowGroups, kTerms>;
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
      const float* const scales = s.scales + group / kBlockGroups * kRows;
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
      source = after.tiles, x_source = after.x, row_bytes = after.row_bytes;
      to_fetch = after.last - after.first;
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
  Summed<kRowGroups> result;
  result.stage = goes_on ? stage : ring;
  if (!goes_on) fill_ring<Shape>(after, ring, policy);

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
      result.quads[r] = sum;
    }
  }
  return result;
}

template <bool kPacked, int kTerms, int kRowGroups>
__device__ __forceinline__ Summed<kRowGroups> multiply_any(const Stretch& s, const Stretch& after,
                                                           uint32_t ring, uint32_t stage,
                                                           uint64_t policy, float4* parts) {
  return with_rate(s.tile_words, [&](auto tile_words) {
    return with_codebook<tile_words.value>(s.codebook, [&](auto codebook) {
      constexpr int kCodebook = decltype(codebook)::value;
      return multiply_stretch < decltype(tile_words)::value, kCodebook,
             kPacked || kCodebook == kMul1, kTerms,
             kRowGroups > (s, after, ring, stage, policy, parts);
    });
  });
}

// ---- the kernel ----------------------------------------------------------------------------------
// What a unit is in this launch.
template <bool kDown>
struct Units {
  int column_blocks, blocks, segments;  // 128-blocks of the output and of K; segments of one matrix
  int passes;                           // matrices of a unit: gate and up, or one

  __device__ explicit Units(const Moe& m)
      : column_blocks(static_cast<int>((kDown ? m.hidden : m.inner) / 128)),
        blocks(static_cast<int>((kDown ? m.inner : m.hidden) / 128)),
        segments(segments_of(blocks)),
        passes(!kDown && m.gate.suh.data != nullptr ? 2 : 1) {}
};

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
  extern __shared__ __align__(128) uint32_t shared[];
  float4* const parts = reinterpret_cast<float4*>(shared + kExpertWarps * Shape::kRing / 4);
  longlong2* const kept = reinterpret_cast<longlong2*>(parts + kExpertWarps * Shape::kQuads);
  int* const flag = reinterpret_cast<int*>(kept + kKeptMatrices);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t ring = shared_address(shared) + warp * Shape::kRing;
  const uint64_t policy = evict_first();

  const Units<kDown> units(m);
  const int slices = static_cast<int>(m.slices);
  const int of_unit = units.passes * units.segments;
  const bool two_rotations = !kDown && !one_rotation(m);
  // Down may start when all of gate and up have passed this wait: the sort is done by then, and what it left
  // is all that down needs to fetch its first weights.
  if constexpr (!kDown) wait_for_previous_kernel();
  let_next_kernel_start();
  const int count = __ldcg(s.count);
  const int total = count * slices * units.column_blocks * of_unit;
  const int share = max(1, (total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  const int begin = min(static_cast<int>(blockIdx.x) * share, total);
  const int stop = min(begin + share, total);
  unsigned* const arrived = kDown ? s.arrived_hidden : s.arrived_inner;

  const auto matrix_of = [&](int sliced, int pass) {
    const int which = kDown ? 2 : units.passes == 1 || pass == 1 ? 1 : 0;  // of the table
    return __ldcg(s.matrices + sliced * 3 + which);
  };
  const int first_sliced = begin / of_unit / units.column_blocks;
  if (begin < stop && threadIdx.x < kKeptMatrices) {
    const int sliced = first_sliced + static_cast<int>(threadIdx.x) / units.passes;
    if (sliced <= (stop - 1) / of_unit / units.column_blocks)
      kept[threadIdx.x] = matrix_of(sliced, static_cast<int>(threadIdx.x) % units.passes);
  }
  // Vectors that the units' last steps will want, a lane a unit: else each of these would wait for memory.
  if (threadIdx.x < 32 && begin + lane * of_unit < stop) {
    const int unit = begin / of_unit + lane;
    const int sliced = unit / units.column_blocks, row_block = sliced / slices;
    const int64_t matrix =
        static_cast<int64_t>(__ldcg(s.expert + row_block)) * slices + (sliced - row_block * slices);
    const int64_t feature = (unit - sliced * units.column_blocks) * 128;
    const auto want = [&](const Stack& vectors) {
      prefetch(vector_of(vectors, matrix) + feature);
      prefetch(vector_of(vectors, matrix) + feature + 64);
    };
    if constexpr (kDown) {
      want(m.down.svh);
    } else {
      want(m.up.svh);
      want(m.down.suh);
      if (units.passes == 2) want(m.gate.svh);
    }
  }
  __syncthreads();

  const auto stretch_of = [&](int at) {
    Stretch stretch = {};
    stretch.tile_words = 16;
    if (at >= stop) return stretch;  // nothing to copy
    const int unit = at / of_unit, segment = at - unit * of_unit;
    const int sliced = unit / units.column_blocks,
              column_block = unit - sliced * units.column_blocks;
    const int pass = segment / units.segments;
    const int place = (sliced - first_sliced) * units.passes + pass;
    const longlong2 matrix = place < kKeptMatrices ? kept[place] : matrix_of(sliced, pass);
    const int first_block = (segment - pass * units.segments) * kSegmentBlocks;
    const int groups = groups_of_segment(segment - pass * units.segments, units.blocks);
    stretch.tile_words = static_cast<int>(matrix.y);
    stretch.codebook = kDown                     ? m.down.codebook
                       : pass + 1 < units.passes ? m.gate.codebook
                                                 : m.up.codebook;
    stretch.first = first_group_of(warp, groups);
    stretch.last = first_group_of(warp + 1, groups);
    const int64_t k_tile = static_cast<int64_t>(first_block) * 8 + stretch.first * kExpertGroup;
    const int tile_bytes = stretch.tile_words * 2;
    stretch.row_bytes = static_cast<uint32_t>(units.column_blocks * 8 * tile_bytes);
    stretch.tiles = reinterpret_cast<const char*>(m.packed + matrix.x) +
                    k_tile * stretch.row_bytes + column_block * 8 * tile_bytes;
    const int64_t rows = two_rotations ? sliced * 2 + pass : sliced;
    stretch.x = reinterpret_cast<const char*>(kDown ? s.inner : s.x) +
                (rows * units.blocks * 8 + k_tile) * Shape::kX;
    stretch.scales =
        (kDown ? s.inner_scales : s.x_scales) + (rows * units.blocks + first_block) * kRows;
    return stretch;
  };

  Stretch now = stretch_of(begin);
  fill_ring<Shape>(now, ring, policy, true, false);
  if constexpr (kDown) wait_for_previous_kernel();
  fill_ring<Shape>(now, ring, policy, false, true);
  uint32_t stage = ring;
  float4 held[2][kRowGroups] = {};  // this thread's quads of the unit's sums, of gate and of up
  for (int at = begin; at < stop; ++at) {
    const Stretch after = stretch_of(at + 1);
    const Summed<kRowGroups> summed =
        multiply_any<kExact, kTerms, kRowGroups>(now, after, ring, stage, policy, parts);
    now = after;
    stage = summed.stage;

    const int unit = at / of_unit, segment = at - unit * of_unit;
    const int pass = segment / units.segments;
    const bool whole = begin <= unit * of_unit && (unit + 1) * of_unit <= stop;
    const auto part_of = [&](int block, int of_segment) {
      // A block's stretch begins in the unit of its first slot; any other that it does not have to itself
      // is its last, and has the second.
      const int place = block * share >= unit * of_unit ? 0 : 1;
      return reinterpret_cast<float4*>(s.parts) +
             ((static_cast<int64_t>(block) * 2 + place) * of_unit + of_segment) * kSums +
             threadIdx.x;
    };
#pragma unroll
    for (int r = 0; r < kRowGroups; ++r) {
      if (!whole) {
        __stcg(part_of(blockIdx.x, segment) + r * kUnitQuads, summed.quads[r]);
        continue;
      }
#pragma unroll
      for (int of_pass = 0; of_pass < 2; ++of_pass) {
        if (of_pass != pass) continue;
        if (segment > pass * units.segments)
          held[of_pass][r] = add(held[of_pass][r], summed.quads[r]);
        else
          held[of_pass][r] = summed.quads[r];
      }
    }
    if (segment + 1 < of_unit && at + 1 < stop) continue;
    __syncthreads();

    if (!whole) {
      const int from = unit * of_unit / share, to = ((unit + 1) * of_unit - 1) / share;
      if (threadIdx.x == 0) *flag = arrive(arrived + unit) == static_cast<unsigned>(to - from);
      __syncthreads();
      const bool last_to_come = *flag != 0;
      __syncthreads();
      if (!last_to_come) continue;
#pragma unroll
      for (int of_pass = 0; of_pass < 2; ++of_pass) {
        if (of_pass == units.passes) break;
#pragma unroll
        for (int r = 0; r < kRowGroups; ++r) {
          for (int i = 0; i < units.segments; ++i) {
            const int of_segment = of_pass * units.segments + i;
            const float4 part =
                __ldcg(part_of((unit * of_unit + of_segment) / share, of_segment) + r * kUnitQuads);
            if (i == 0)
              held[of_pass][r] = part;
            else
              held[of_pass][r] = add(held[of_pass][r], part);
          }
        }
      }
    }
#pragma unroll
    for (int of_pass = 0; of_pass < 2; ++of_pass) {
#pragma unroll
      for (int r = 0; r < kRowGroups; ++r)
        parts[of_pass * kSums + r * kUnitQuads + threadIdx.x] = held[of_pass][r];
    }
    __syncthreads();
    const int sliced = unit / units.column_blocks,
              column_block = unit - sliced * units.column_blocks;
    const int row_block = sliced / slices;
    const int64_t matrix =
        static_cast<int64_t>(s.expert[row_block]) * slices + (sliced - row_block * slices);

    // ---- the unit's sums are complete: a warp finishes a row ---------------------------------------
    const int feature = column_block * 128 + lane * 4;
    for (int row = warp; row < kRows; row += kExpertWarps) {
      const int slot = row_block * kRows + row;
      if (s.route[slot] < 0) continue;
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
        *reinterpret_cast<float4*>(
            s.results +
            (static_cast<int64_t>(slot) * slices + sliced - row_block * slices) * m.hidden +
            feature) = float4{u[0], u[1], u[2], u[3]};
      } else {
        sums_of(units.passes - 1, u);
        if (units.passes == 2) sums_of(0, g);
        finish_inner(m, matrix, feature, g, u);
        float suh[4];
        load_scales(vector_of(m.down.suh, matrix), column_block, suh);
        write_fragments(u, suh,
                        s.inner + static_cast<int64_t>(sliced) * units.column_blocks * 8 * kTerms *
                                      kRowGroups * 64,
                        s.inner_scales + static_cast<int64_t>(sliced) * units.column_blocks * kRows,
                        column_block, row, kRowGroups, kTerms);
      }
    }
  }
}

// Both products for one number of rows; instantiated in experts_*.cu.
template <int kRowGroups, bool kExact>
cudaError_t launch_experts(bool down, const Moe& m, const MoeScratch& scratch, int grid,
                           cudaStream_t stream);

}  // namespace trellis::cuda
