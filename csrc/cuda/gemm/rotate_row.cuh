// A row times suh, scaled by a power of two so that FP16 holds it, and transformed: by one block, a lane 16
// neighbours, eight lanes a block of 128 inputs. Most of the transform's steps are in a lane then, and what a
// thread has loaded stays until the row's scale is known.
#pragma once

#include "rows.cuh"

namespace trellis::cuda {

constexpr int kRowWarps = 16;  // of a block, at most
constexpr int kRowBlocks = 4;  // 128-blocks of a warp

// The exponent of a power of two near a row's largest magnitude, given that over 2^below: what is left fits FP16.
__device__ __forceinline__ int row_exponent_of(float most, int below) {
  if (!(most > 0.0f) || isinf(most)) return 0;
  // Denormal numbers have no exponent of their own.
  if (most < 0x1p-126f) most *= 0x1p24f, below -= 24;
  return max(-126, min(126, (__float_as_int(most) >> 23) - 127 + below));
}

// Returns the exponent of the row's scale. load(column, v) gives 16 neighbours of x, write(column, v) takes what
// becomes of them. Rows of more than kRowWarps * kRowBlocks blocks are loaded twice.
template <typename Load, typename Write>
__device__ __forceinline__ int rotate_row(const __half* suh, int blocks, Load load, Write write) {
  __shared__ float largest[kRowWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int turns = (blocks + warps * kRowBlocks - 1) / (warps * kRowBlocks);
  const bool wide = reinterpret_cast<uintptr_t>(suh) % 16 == 0;
  const auto block_of = [&](int turn) { return (turn * warps + warp) * kRowBlocks + lane / 8; };
  float v[16];  // x * factor * suh
  const auto load_turn = [&](int turn, float factor) {
#pragma unroll
    for (float& value : v) value = 0.0f;
    // Lanes beyond the end go through the motions, since whole warps do.
    const int block = block_of(turn), column = min(block, blocks - 1) * 128 + lane % 8 * 16;
    float scale[16];
    load(column, v);
    load_sixteen(suh + column, wide, scale);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = block < blocks ? v[i] * factor * scale[i] : 0.0f;
  };
  const auto largest_over = [&](float factor) {
    float most = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < turns; ++turn) {
      load_turn(turn, factor);
#pragma unroll
      for (const float value : v) most = fmaxf(most, fabsf(value));
    }
    most = warp_max(most);
    __syncthreads();  // an earlier result has been read
    if (lane == 0) largest[warp] = most;
    __syncthreads();
    return warp_max(lane < warps ? largest[lane] : 0.0f);
  };
  float most = largest_over(1.0f);
  int exponent = row_exponent_of(most, 0);
  // A row is scaled after the transform, which changes nothing, unless x * suh or its sums might overflow or
  // lose bits.
  const bool before = isinf(most) || (most > 0.0f && (exponent < -60 || exponent > 100));
  if (isinf(most)) {
    most = largest_over(0x1p-16f);
    exponent = row_exponent_of(most, 16);
  }
  const float scale = power_of_two(-exponent);
  const float after = kHadamardScale * (before ? 1.0f : scale);
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (turns > 1 || before) load_turn(turn, before ? scale : 1.0f);
    lanes_hadamard(v, lane);
#pragma unroll
    for (float& value : v) value *= after;
    const int block = block_of(turn);
    if (block < blocks) write(block * 128 + lane % 8 * 16, v);
  }
  return exponent;
}

// Threads of a block for a row of so many 128-blocks.
inline int row_threads(int64_t blocks) {
  const int64_t groups = (blocks + kRowBlocks - 1) / kRowBlocks;
  const int64_t turns = (groups + kRowWarps - 1) / kRowWarps;
  return static_cast<int>((groups + turns - 1) / turns) * 32;
}

// Where eight neighbours of a row's 64 inputs lie in swizzled atoms of eight rows, as wgmma reads them: 16-byte
// piece p of row r of an atom is at piece p ^ r.
__device__ __forceinline__ char* piece_of_atom(char* atom, int64_t row, int piece) {
  const int within = static_cast<int>(row % 8);
  return atom + within * 128 + (piece ^ within) * 16;
}

// Sixteen values into the atom of their 64 inputs, and what FP16 leaves of them into the atoms that follow.
__device__ __forceinline__ void write_atoms(float (&v)[16], char* atom, int64_t row, int column,
                                            int terms) {
  for (int term = 0; term < terms; ++term, atom += 1024) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const __half2 two = __floats2half2_rn(v[2 * i], v[2 * i + 1]);
      pairs[i] = reinterpret_cast<const uint32_t&>(two);
      if (term + 1 < terms) v[2 * i] -= __low2float(two), v[2 * i + 1] -= __high2float(two);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(piece_of_atom(atom, row, column % 64 / 8 + i)) =
          uint4{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
  }
}

}  // namespace trellis::cuda
