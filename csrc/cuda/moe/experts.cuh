// The products of routed experts, gate and up with the activation or down, for up to 16 rows of an expert
// at a time.
//
// A unit is a row block's 128 output features of one slice: its gate and up (or down alone), each cut into
// segments of K. The segments of all units are laid end to end and dealt to the thread blocks in equal
// stretches; how many there are is known on the device alone. In a segment the warps share K and the
// features as in ../gemm/small.cuh, each with a ring of packed tiles of its own; their sums meet in shared
// memory. A unit that lies in several stretches is finished by whichever block comes last.
//
// Weights are the A operand. Rows are FP16 with one scale for each 128 inputs, at whose end sums are folded
// into float32 ones, so no activation is too large and no block of outliers costs the others anything.
#pragma once

#include "../../rates.h"
#include "../decode/decode.cuh"
#include "vectors.cuh"

namespace trellis::cuda {

constexpr int kExpertWarps = 8;
constexpr int kExpertGroup = 4;      // k tiles fetched and multiplied at a time: half a 128-block
constexpr int kExpertWarpTiles = 4;  // output tiles of a warp
constexpr int kExpertColumnWarps = 8 / kExpertWarpTiles;
constexpr int kExpertDepthWarps = kExpertWarps / kExpertColumnWarps;
constexpr int kUnitSums = 1024;  // of eight rows
constexpr int kRingBytes = 64 * 1024;
constexpr int kRingWords = kRingBytes / 4 / kExpertWarps;  // of a warp
__host__ __device__ constexpr int expert_stages(int tile_words) { return tile_words <= 64 ? 3 : 2; }

// Bytes of shared memory: the rings, sums of gate, of up and of a segment, a flag.
template <int kRowGroups>
constexpr int expert_shared_bytes() {
  return kRingBytes + 3 * kRowGroups * kUnitSums * 4 + 16;
}

// What a warp does of a segment.
struct Stretch {
  const uint32_t* tiles;  // packed words: the warp's columns at its first k tile
  const uint32_t* x;      // fragments at its first k tile
  const float* scales;    // of the segment's first 128-block
  int row_words;          // from one k tile to the next
  int tile_words, codebook;
  int first, last;  // groups, counted from a 128-block's beginning
};

// Where the sum of a row (of eight) and a feature lies: as MMA results fall, tile, lane, register.
__device__ __forceinline__ int unit_sum_index(int row, int feature) {
  const int lane = feature % 8 * 4 + row / 2;
  return feature / 16 * 128 + lane * 4 + feature / 8 % 2 * 2 + row % 2;
}

__device__ __forceinline__ void add_to(float4& a, float4 b) {
  a.x += b.x, a.y += b.y, a.z += b.z, a.w += b.w;
}

// Starts the copies of a stretch's first groups, one for each stage of the ring.
__device__ __forceinline__ void fill_ring(const Stretch& s, uint32_t* ring, uint64_t policy) {
  const int lane = threadIdx.x % 32;
  const int k_tile_words = kExpertWarpTiles * s.tile_words / 2;
  const uint32_t* source = s.tiles + lane * 4;
  uint32_t* to = ring + lane * 4;
  for (int stage = 0; stage < expert_stages(s.tile_words); ++stage) {
    if (s.first + stage < s.last) {
#pragma unroll
      for (int i = 0; i < kExpertGroup; ++i) {
        for (int word = 0; lane * 4 + word < k_tile_words; word += 128)
          copy_async_16(to + word, source + word, policy);
        to += k_tile_words;
        source += s.row_words;
      }
    }
    copy_commit();
  }
}

// Adds up a segment, whose first groups are in the ring or on their way, in `segment` [row groups][1024],
// which the block has when this returns; on the way starts the copies of the stretch that comes next. A
// function rather than inlined, since a kernel has one for each rate and codebook. kTerms: FP16 numbers
// whose sum is x.
template <int kTileWords, int kCodebook, bool kPacked, int kTerms, int kRowGroups>
__device__ __noinline__ void multiply_stretch(const Stretch s, const Stretch after,
                                              const PowersOfTwo& powers, uint32_t* ring,
                                              uint64_t policy, float4* segment) {
  constexpr int kTile = kTileWords / 2;
  constexpr int kKTile = kExpertWarpTiles * kTile;
  constexpr int kStage = kExpertGroup * kKTile;
  constexpr int kStages = expert_stages(kTileWords);
  static_assert(kStages * kStage <= kRingWords, "the ring fits");
  constexpr int kRows = kRowGroups * 8;
  constexpr int kLoads = kTerms * kRowGroups;
  // k tiles whose x is loaded at a time.
  constexpr int kAhead = kLoads == 1 ? kExpertGroup : 1;

  const int lane = threadIdx.x % 32;
  const Window<kTileWords> window(lane);
  const Hash hash = hash_for<kCodebook>();

  const uint2* x_source = reinterpret_cast<const uint2*>(s.x) + lane;
  uint2 next[kAhead][kLoads];
  const auto load_x = [&](bool real) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
#pragma unroll
      for (int r = 0; r < kLoads; ++r)
        next[i][r] = real ? x_source[(i * kLoads + r) * 32] : uint2{};
    }
    x_source += kAhead * kLoads * 32;
  };
  load_x(s.first < s.last);

  int to_fetch = s.last - s.first - kStages;
  const uint32_t* source =
      s.tiles + lane * 4 + static_cast<int64_t>(kStages) * kExpertGroup * s.row_words;
  float sums[kRowGroups][kExpertWarpTiles][4] = {};
  float block[kRowGroups][kExpertWarpTiles][4] = {};  // of the current 128 inputs
  int stage = 0;
  for (int group = s.first; group < s.last; ++group) {
    copy_wait<kStages - 1>();
    __syncwarp();
    uint32_t* const packed = ring + stage * kStage;
#pragma unroll
    for (int i = 0; i < kExpertGroup; ++i) {
      uint2 now[kLoads];
#pragma unroll
      for (int r = 0; r < kLoads; ++r) now[r] = next[i % kAhead][r];
      if (i % kAhead == kAhead - 1) load_x(group + 1 < s.last || i + 1 < kExpertGroup);
#pragma unroll
      for (int j = 0; j < kExpertWarpTiles; ++j) {
        uint32_t v[3], p[8];
        const uint32_t* const tile = packed + i * kKTile + j * kTile;
        load_stretch<kTileWords>([=](int word) { return tile[word]; }, window, v);
        products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
        if constexpr (kPacked) {
          uint32_t a[4];
          packed_values<kCodebook == kMul1>(p, a);
#pragma unroll
          for (int r = 0; r < kLoads; ++r)
            mma_f16(block[r % kRowGroups][j], a[0], a[1], a[2], a[3], now[r].x, now[r].y);
        } else {
#pragma unroll
          for (uint32_t& product : p) product = halves(product);
#pragma unroll
          for (int r = 0; r < kRowGroups; ++r) {
            mma_f16(block[r][j], p[0], p[4], p[1], p[5], __byte_perm(now[r].x, 0, 0x1010),
                    __byte_perm(now[r].x, 0, 0x3232));
            mma_f16(block[r][j], p[2], p[6], p[3], p[7], __byte_perm(now[r].y, 0, 0x1010),
                    __byte_perm(now[r].y, 0, 0x3232));
          }
        }
      }
    }
    __syncwarp();  // everybody has read the stage before it is filled again
    if (to_fetch-- > 0) {
#pragma unroll
      for (int i = 0; i < kExpertGroup; ++i) {
#pragma unroll
        for (int word = 0; word < kKTile; word += 128) {
          if (lane * 4 + word < kKTile)
            copy_async_16(packed + lane * 4 + i * kKTile + word, source + i * s.row_words + word,
                          policy);
        }
      }
      source += static_cast<int64_t>(kExpertGroup) * s.row_words;
    }
    copy_commit();
    if (++stage == kStages) stage = 0;
    if (group % 2 == 1 || group + 1 == s.last) {
#pragma unroll
      for (int r = 0; r < kRowGroups; ++r) {
        const float2 scale =
            *reinterpret_cast<const float2*>(s.scales + group / 2 * kRows + r * 8 + lane % 4 * 2);
#pragma unroll
        for (int j = 0; j < kExpertWarpTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            sums[r][j][i] = fmaf(block[r][j][i], i % 2 == 0 ? scale.x : scale.y, sums[r][j][i]);
            block[r][j][i] = 0.0f;
          }
        }
      }
    }
  }
  fill_ring(after, ring, policy);

  // The warps that share K add their sums in order.
  const int warp = threadIdx.x / 32, depth = warp / kExpertColumnWarps;
  float4* const mine = segment + warp % kExpertColumnWarps * kExpertWarpTiles * 32 + lane;
  for (int turn = 0; turn < kExpertDepthWarps; ++turn) {
    __syncthreads();  // also: whoever still read the segment before has done so
    if (turn != depth) continue;
#pragma unroll
    for (int r = 0; r < kRowGroups; ++r) {
#pragma unroll
      for (int j = 0; j < kExpertWarpTiles; ++j) {
        const float (&sum)[4] = sums[r][j];
        float4* const at = mine + r * (kUnitSums / 4) + j * 32;
        float4 so_far = turn == 0 ? float4{} : *at;
        add_to(so_far, float4{sum[0], sum[1], sum[2], sum[3]});
        *at = so_far;
      }
    }
  }
  __syncthreads();
}

template <bool kPacked, int kTerms, int kRowGroups>
__device__ __forceinline__ void multiply_any(const Stretch& s, const Stretch& after,
                                             const PowersOfTwo& powers, uint32_t* ring,
                                             uint64_t policy, float4* segment) {
  with_rate(s.tile_words, [&](auto tile_words) {
    with_codebook<tile_words.value>(s.codebook, [&](auto codebook) {
      constexpr int kCodebook = decltype(codebook)::value;
      multiply_stretch<decltype(tile_words)::value, kCodebook, kPacked || kCodebook == kMul1, kTerms,
                       kRowGroups>(s, after, powers, ring, policy, segment);
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
        segments((blocks + segment_blocks(blocks) - 1) / segment_blocks(blocks)),
        passes(!kDown && m.gate.suh.data != nullptr ? 2 : 1) {}
};

// kExact: values as their definition rounds them, and x in two terms. FP16 and FP32 results need it, since
// three layers' errors add up; BF16 ones are rounded more than that.
template <bool kDown, bool kExact, int kRowGroups>
__global__ void __launch_bounds__(kExpertWarps * 32, 2)
    expert_kernel(const Moe m, const MoeScratch s, const PowersOfTwo powers) {
  constexpr int kRows = kRowGroups * 8;
  constexpr int kTerms = kExact ? 2 : 1;
  extern __shared__ __align__(128) uint32_t shared[];
  float4* const held = reinterpret_cast<float4*>(shared + kRingBytes / 4);  // [pass][row group][]
  float4* const summed = held + 2 * kRowGroups * (kUnitSums / 4);           // [row group][]
  int* const flag = reinterpret_cast<int*>(summed + kRowGroups * (kUnitSums / 4));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int depth = warp / kExpertColumnWarps;
  const int column = warp % kExpertColumnWarps * kExpertWarpTiles;
  uint32_t* const ring = shared + warp * kRingWords;
  const uint64_t policy = evict_first();

  let_next_kernel_start();
  const Units<kDown> units(m);
  const int slices = static_cast<int>(m.slices);
  const int of_unit = units.passes * units.segments;
  const bool two_rotations = !kDown && !one_rotation(m);
  wait_for_previous_kernel();
  const int total = *s.count * slices * units.column_blocks * of_unit;
  const int share = max(1, (total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  const int begin = min(static_cast<int>(blockIdx.x) * share, total);
  const int stop = min(begin + share, total);
  unsigned* const arrived =
      s.arrived + (kDown ? static_cast<int64_t>(s.row_blocks) * slices * (m.inner / 128) : 0);

  const auto stretch_of = [&](int at) {
    Stretch stretch = {};
    stretch.tile_words = 16;
    if (at >= stop) return stretch;  // nothing to copy
    const int unit = at / of_unit, segment = at - unit * of_unit;
    const int sliced = unit / units.column_blocks,
              column_block = unit - sliced * units.column_blocks;
    const int pass = segment / units.segments;
    const int which = kDown ? 2 : units.passes == 1 || pass == 1 ? 1 : 0;  // of the table
    const longlong2 matrix = s.matrices[sliced * 3 + which];
    const int segment_length = segment_blocks(units.blocks);
    const int first_block = (segment - pass * units.segments) * segment_length;
    const int groups = 2 * min(segment_length, units.blocks - first_block);
    stretch.tile_words = static_cast<int>(matrix.y);
    stretch.codebook = kDown ? m.down.codebook : which == 0 ? m.gate.codebook : m.up.codebook;
    stretch.first = groups * depth / kExpertDepthWarps;
    stretch.last = groups * (depth + 1) / kExpertDepthWarps;
    const int64_t k_tile = static_cast<int64_t>(first_block) * 8 + stretch.first * kExpertGroup;
    const int tile = stretch.tile_words / 2;
    stretch.row_words = units.column_blocks * 8 * tile;
    stretch.tiles = reinterpret_cast<const uint32_t*>(m.packed + matrix.x) +
                    k_tile * stretch.row_words + (column_block * 8 + column) * tile;
    const int64_t rows = two_rotations ? sliced * 2 + pass : sliced;
    stretch.x =
        (kDown ? s.inner : s.x) + (rows * units.blocks * 8 + k_tile) * kTerms * kRowGroups * 64;
    stretch.scales =
        (kDown ? s.inner_scales : s.x_scales) + (rows * units.blocks + first_block) * kRows;
    return stretch;
  };

  Stretch now = stretch_of(begin);
  fill_ring(now, ring, policy);
  for (int at = begin; at < stop; ++at) {
    const Stretch after = stretch_of(at + 1);
    multiply_any<kExact, kTerms, kRowGroups>(now, after, powers, ring, policy, summed);
    now = after;

    const int unit = at / of_unit, segment = at - unit * of_unit;
    const int pass = segment / units.segments;
    const bool whole = begin <= unit * of_unit && (unit + 1) * of_unit <= stop;
    const auto part_of = [&](int block, int of_segment) {
      // A block's stretch begins in the unit of its first slot; any other that it does not have to itself
      // is its last, and has the second.
      const int place = block * share >= unit * of_unit ? 0 : 1;
      return reinterpret_cast<float4*>(s.parts) +
             ((static_cast<int64_t>(block) * 2 + place) * of_unit + of_segment) *
                 (kRowGroups * kUnitSums / 4) +
             threadIdx.x;
    };
#pragma unroll
    for (int r = 0; r < kRowGroups; ++r) {
      float4 sum = summed[r * (kUnitSums / 4) + threadIdx.x];
      float4* const mine = held + (pass * kRowGroups + r) * (kUnitSums / 4) + threadIdx.x;
      if (!whole) {
        __stcg(part_of(blockIdx.x, segment) + r * (kUnitSums / 4), sum);
      } else {
        if (segment > pass * units.segments) {
          float4 so_far = *mine;
          add_to(so_far, sum);
          sum = so_far;
        }
        *mine = sum;
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
      for (int of_pass = 0; of_pass < units.passes; ++of_pass) {
#pragma unroll
        for (int r = 0; r < kRowGroups; ++r) {
          float4 so_far = {};
          for (int i = 0; i < units.segments; ++i) {
            const int of_segment = of_pass * units.segments + i;
            const float4 part = __ldcg(part_of((unit * of_unit + of_segment) / share, of_segment) +
                                       r * (kUnitSums / 4));
            if (i == 0)
              so_far = part;
            else
              add_to(so_far, part);
          }
          held[(of_pass * kRowGroups + r) * (kUnitSums / 4) + threadIdx.x] = so_far;
        }
      }
      __syncthreads();
    }
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
            reinterpret_cast<const float*>(held) + (of_pass * kRowGroups + row / 8) * kUnitSums;
#pragma unroll
        for (int i = 0; i < 4; ++i) z[i] = sums[unit_sum_index(row % 8, lane * 4 + i)];
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
        finish_linear(m.up, matrix, feature, u);
        add_bias(m.up.bias, matrix, feature, u);
        if (units.passes == 2) {
          sums_of(0, g);
          finish_linear(m.gate, matrix, feature, g);
          add_bias(m.gate.bias, matrix, feature, g);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i)
          u[i] = feature + i < m.intermediate ? activate(m, g[i], u[i]) : 0.0f;
        write_fragments(u, vector_of(m.down.suh, matrix),
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
