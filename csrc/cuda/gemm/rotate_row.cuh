// A row times suh, scaled by a power of two so that FP16 holds it, and transformed, by one block. What bounds it is the
// number of instructions: a lane has many elements of few blocks of 128, so that most of the transform's steps are its
// own, and what it has loaded stays in registers until the row's scale is known.
#pragma once

#include "rows.cuh"

namespace trellis::cuda {

constexpr int kRowWarps = 16;  // of a block, at most

// How lanes share a 128-block of a row: each has kUnits times kNeighbours neighbours, as far apart as what all lanes load
// at a time is long.
template <int kNeighbours_, int kUnits_>
struct Lanes {
  static constexpr int kNeighbours = kNeighbours_, kUnits = kUnits_;
  static constexpr int kOfBlock = 128 / (kNeighbours * kUnits);
  static constexpr int kWarpBlocks = 32 / kOfBlock;
  static constexpr int kApart = 128 / kUnits;  // features between units
  using Values = float[kUnits][kNeighbours];

  // This lane's block among those of its warp, and the first of its features.
  static __device__ __forceinline__ int block() { return threadIdx.x % 32 / kOfBlock; }
  static __device__ __forceinline__ int feature() {
    return static_cast<int>(threadIdx.x) % kOfBlock * kNeighbours;
  }

  // H(v * scale) of each of the warp's blocks, not normalised.
  static __device__ __forceinline__ void transform(Values& v, float scale) {
#pragma unroll
    for (auto& unit : v) {
#pragma unroll
      for (int i = 0; i < kNeighbours; i += 2) {
        const float a = unit[i], b = unit[i + 1] * scale;
        unit[i] = fmaf(a, scale, b), unit[i + 1] = fmaf(a, scale, -b);
      }
    }
    float* const all = v[0];
#pragma unroll
    for (int stride = 2; stride < kUnits * kNeighbours; stride *= 2) {
#pragma unroll
      for (int i = 0; i < kUnits * kNeighbours; ++i)
        if ((i & stride) == 0) butterfly(all[i], all[i + stride]);
    }
#pragma unroll
    for (int stride = 1; stride < kOfBlock; stride *= 2) {
      const float sign = threadIdx.x & stride ? -1.0f : 1.0f;
#pragma unroll
      for (int i = 0; i < kUnits * kNeighbours; ++i)
        all[i] = fmaf(sign, all[i], __shfl_xor_sync(0xFFFFFFFFu, all[i], stride));
    }
  }
};

// The exponent of a power of two near a row's largest magnitude, given that over 2^below: what is left fits FP16.
__device__ __forceinline__ int row_exponent_of(float most, int below) {
  if (!(most > 0.0f) || isinf(most)) return 0;
  // Denormal numbers have no exponent of their own.
  if (most < 0x1p-126f) most *= 0x1p24f, below -= 24;
  return max(-126, min(126, (__float_as_int(most) >> 23) - 127 + below));
}

// A lane's part of x * factor * suh in 128-block `block`. Lanes beyond the end go through the motions, since whole warps
// do. load(column, v) gives a lane's part of the 128 inputs of x from `column` on.
template <typename Lanes, typename Load>
__device__ __forceinline__ void load_scaled(const __half* suh, bool wide, int block, int blocks,
                                            float factor, const Load& load,
                                            typename Lanes::Values& v) {
  const int column = min(block, blocks - 1) * 128;
  load(column, v);
  suh += column + Lanes::feature();
#pragma unroll
  for (int unit = 0; unit < Lanes::kUnits; ++unit) {
    float scale[Lanes::kNeighbours];
    load_neighbours(suh + unit * Lanes::kApart, wide, true, scale);
#pragma unroll
    for (int i = 0; i < Lanes::kNeighbours; ++i) v[unit][i] = v[unit][i] * factor * scale[i];
  }
}

template <typename Lanes>
__device__ __forceinline__ float largest_of_values(const typename Lanes::Values& v) {
  float most = 0.0f;
#pragma unroll
  for (const auto& unit : v) {
#pragma unroll
    for (const float value : unit) most = fmaxf(most, fabsf(value));
  }
  return most;
}

// Of a block whose warps leave theirs in `of_warps`; none is negative or a NaN, so they compare as integers.
__device__ __forceinline__ float largest_of_block(float value, float* of_warps) {
  const auto of_warp = [](float value) {
    return __uint_as_float(__reduce_max_sync(0xFFFFFFFFu, __float_as_uint(value)));
  };
  const int warps = static_cast<int>(blockDim.x) / 32, lane = threadIdx.x % 32;
  value = of_warp(value);
  if (warps == 1) return value;
  if (lane == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return of_warp(lane < warps ? of_warps[lane] : 0.0f);
}

// Whether x * suh itself might overflow or lose bits, so that x is to be scaled first.
__device__ __forceinline__ bool is_unusual(float most, int exponent) {
  return isinf(most) || (most > 0.0f && (exponent < -60 || exponent > 100));
}

// Any row: it is loaded once more for each time that it is gone through.
template <typename Lanes, typename Load, typename Write>
__device__ __noinline__ int rotate_any_row(const __half* suh, int blocks, float* of_warps,
                                           const Load load, const Write write) {
  const int warps = static_cast<int>(blockDim.x) / 32, step = warps * Lanes::kWarpBlocks;
  const int own = static_cast<int>(threadIdx.x) / 32 * Lanes::kWarpBlocks + Lanes::block();
  const bool wide = reinterpret_cast<uintptr_t>(suh) % 16 == 0;
  const auto turns = [&](float factor, auto f) {
#pragma unroll 1
    for (int block = own; block - Lanes::block() < blocks; block += step) {
      typename Lanes::Values v;
      load_scaled<Lanes>(suh, wide, block, blocks, factor, load, v);
      f(block, v);
    }
  };
  float most, factor = 1.0f;
  int exponent;
#pragma unroll 1
  for (int below = 0; below <= 16; below += 16, factor = 0x1p-16f) {
    most = 0.0f;
    turns(factor, [&](int, auto& v) { most = fmaxf(most, largest_of_values<Lanes>(v)); });
    __syncthreads();  // what was there has been read
    most = largest_of_block(most, of_warps);
    exponent = row_exponent_of(most, below);
    if (!isinf(most)) break;
  }
  const float scale = power_of_two(-exponent);
  const bool before = factor != 1.0f || is_unusual(most, exponent);
  turns(before ? scale : 1.0f, [&](int block, auto& v) {
    Lanes::transform(v, kHadamardScale * (before ? 1.0f : scale));
    if (block < blocks) write(block * 128, v);
  });
  return exponent;
}

// Returns the exponent of the row's scale. load(column, v): as above; write(column, v) takes what becomes of them.
// `odd`: of every other call of a thread block, which then need not wait for what the one before has left.
template <typename Lanes, typename Load, typename Write>
__device__ __forceinline__ int rotate_row(const __half* suh, int blocks, bool odd, const Load& load,
                                          const Write& write) {
  __shared__ float of_warps[2][kRowWarps];
  const int block = static_cast<int>(threadIdx.x) / 32 * Lanes::kWarpBlocks + Lanes::block();
  // What follows stays in registers.
  const bool is_short = blocks <= static_cast<int>(blockDim.x) / 32 * Lanes::kWarpBlocks;
  if (!is_short || reinterpret_cast<uintptr_t>(suh) % 16 != 0)
    return rotate_any_row<Lanes>(suh, blocks, of_warps[odd], load, write);
  typename Lanes::Values v;
  load_scaled<Lanes>(suh, true, block, blocks, 1.0f, load, v);
  const float most = largest_of_block(largest_of_values<Lanes>(v), of_warps[odd]);
  const int exponent = row_exponent_of(most, 0);
  if (is_unusual(most, exponent))
    return rotate_any_row<Lanes>(suh, blocks, of_warps[odd], load, write);
  Lanes::transform(v, kHadamardScale * power_of_two(-exponent));
  if (block < blocks) write(block * 128, v);
  return exponent;
}

// Threads of a block for a row of so many 128-blocks.
template <typename Lanes>
int row_threads(int64_t blocks) {
  const int64_t groups = (blocks + Lanes::kWarpBlocks - 1) / Lanes::kWarpBlocks;
  const int64_t turns = (groups + kRowWarps - 1) / kRowWarps;
  return static_cast<int>((groups + turns - 1) / turns) * 32;
}

// Where eight neighbours of a row's 64 inputs lie in swizzled atoms of eight rows, as wgmma reads them: 16-byte
// piece p of row r of an atom is at piece p ^ r.
__device__ __forceinline__ char* piece_of_atom(char* atom, int64_t row, int piece) {
  const int within = static_cast<int>(row % 8);
  return atom + within * 128 + (piece ^ within) * 16;
}

// A lane's part of 128 values of a row into the atoms of their halves, the second `step` bytes behind the first. What
// FP16 leaves of them goes into the atoms that follow, for each further term.
template <typename Lanes>
__device__ __forceinline__ void write_atoms(typename Lanes::Values& v, char* atoms, int64_t step,
                                            int64_t row, int terms) {
  constexpr int kPairs = Lanes::kNeighbours / 2;
  static_assert((kPairs == 2 || kPairs == 4) && 64 % Lanes::kApart == 0, "");
  // A unit's bits of the piece's number are none of the lane's.
  const int within = static_cast<int>(row % 8), feature = Lanes::feature();
  const int byte = (feature / 8 ^ within) * 16 + feature % 8 * 2;
  atoms += within * 128;
#pragma unroll 1
  for (int term = 0; term < terms; ++term, atoms += 1024) {
#pragma unroll
    for (int unit = 0; unit < Lanes::kUnits; ++unit) {
      uint32_t pairs[kPairs];
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        float* const from = v[unit] + 2 * i;
        const __half2 two = __floats2half2_rn(from[0], from[1]);
        pairs[i] = reinterpret_cast<const uint32_t&>(two);
        if (term + 1 < terms) from[0] -= __low2float(two), from[1] -= __high2float(two);
      }
      const int of_unit = unit * Lanes::kApart;
      char* const to = atoms + of_unit / 64 * step + (byte ^ of_unit % 64 / 8 * 16);
      if constexpr (kPairs == 4)
        *reinterpret_cast<uint4*>(to) = uint4{pairs[0], pairs[1], pairs[2], pairs[3]};
      else
        *reinterpret_cast<uint2*>(to) = uint2{pairs[0], pairs[1]};
    }
  }
}

}  // namespace trellis::cuda
