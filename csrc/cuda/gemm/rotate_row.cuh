// A row times suh, scaled by a power of two so that FP16 holds it, and transformed: by one block, a lane 16
// neighbours, eight lanes a block of 128 inputs. Most of the transform's steps are in a lane then, and what a
// thread has loaded stays until the row's scale is known.
#pragma once

#include "rows.cuh"

namespace trellis::cuda {

constexpr int kRowWarps = 8;   // of a block, at most
constexpr int kRowBlocks = 4;  // 128-blocks of a warp
constexpr int kMostTurns = 4;  // of a block over the row, with what it has loaded in registers

// The exponent of a power of two near the largest magnitude of x * suh in a row, given that over 2^16:
// whatever the activations are, what is left fits FP16 and float32 holds every sum.
__device__ __forceinline__ int row_exponent_of(float most) {
  if (!(most > 0.0f) || isinf(most)) return 0;
  const int exponent = (__float_as_int(most) >> 23) - 127;  // -127 for a denormal number
  return max(-100, min(126, exponent + 16));
}

// Returns the exponent of the row's scale. load(column, v) gives 16 neighbours of x, write(column, v) takes what
// becomes of them. Rows longer than kTurns turns are loaded twice.
template <int kTurns, typename Load, typename Write>
__device__ __forceinline__ int rotate_row(const __half* suh, int blocks, Load load, Write write) {
  __shared__ float largest[kRowWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int chunks = (blocks + kTurns * warps * kRowBlocks - 1) / (kTurns * warps * kRowBlocks);
  const bool wide = reinterpret_cast<uintptr_t>(suh) % 16 == 0;
  const auto block_of = [&](int chunk, int turn) {
    return ((chunk * kTurns + turn) * warps + warp) * kRowBlocks + lane / 8;
  };
  float held[kTurns][16];
  const auto load_chunk = [&](int chunk) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
      for (float& value : held[turn]) value = 0.0f;
      // Lanes beyond the end go through the motions, since whole warps do.
      const int block = block_of(chunk, turn);
      load(min(block, blocks - 1) * 128 + lane % 8 * 16, held[turn]);
#pragma unroll
      for (float& value : held[turn]) value = block < blocks ? value : 0.0f;
    }
  };
  const auto scaled = [&](int chunk, int turn, float factor, float (&v)[16]) {
    const int block = block_of(chunk, turn);
    load_sixteen(suh + (block < blocks ? block * 128 + lane % 8 * 16 : 0), wide, v);
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = held[turn][i] * factor * v[i];
  };
  float most = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    load_chunk(chunk);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float v[16];
      scaled(chunk, turn, 0x1p-16f, v);  // x * suh itself may overflow
#pragma unroll
      for (const float value : v) most = fmaxf(most, fabsf(value));
    }
  }
  most = warp_max(most);
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  const int exponent = row_exponent_of(warp_max(lane < warps ? largest[lane] : 0.0f));
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1) load_chunk(chunk);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float v[16];
      scaled(chunk, turn, power_of_two(-exponent), v);
      lanes_hadamard(v, lane);
#pragma unroll
      for (float& value : v) value *= kHadamardScale;
      const int block = block_of(chunk, turn);
      if (block < blocks) write(block * 128 + lane % 8 * 16, v);
    }
  }
  return exponent;
}

// How many threads take a row of so many 128-blocks in so many turns, both the least.
struct RowShape {
  int turns, threads;
};
inline RowShape row_shape(int64_t blocks) {
  const int64_t groups = (blocks + kRowBlocks - 1) / kRowBlocks;
  const int turns = groups <= kRowWarps ? 1 : groups <= 2 * kRowWarps ? 2 : kMostTurns;
  const int64_t warps = (groups + turns - 1) / turns;
  return {turns, static_cast<int>(warps < kRowWarps ? warps : kRowWarps) * 32};
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
      v[2 * i] -= __low2float(two), v[2 * i + 1] -= __high2float(two);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i)
      *reinterpret_cast<uint4*>(piece_of_atom(atom, row, column % 64 / 8 + i)) =
          uint4{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
  }
}

}  // namespace trellis::cuda
