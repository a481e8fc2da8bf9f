// Every route's first launch: H(x * suh), scaled by a power of two a row so that any activation fits
// FP16, written in the layout in which that route's matrix instructions want it.
#pragma once

#include "../../cpu/codebook.h"
#include "problem.h"

namespace trellis::cuda {

enum class Operand {
  kHalves,        // FP16 fragments of m16n8k16, of which each element is used twice
  kBytes,         // 16-bit integers, high and low bytes in different columns of m16n8k32
  kPackedHalves,  // FP16 fragments of m16n8k16, for weights of 3inst and mcg
  kPackedMul1,    // the same, for weights of mul1
  kSwizzled,      // FP16 rows of 64 inputs in the swizzled atoms that wgmma reads
};

__host__ __device__ constexpr bool is_integer(Operand operand) {
  return operand == Operand::kBytes;
}
__host__ __device__ constexpr bool is_packed(Operand operand) {
  return operand == Operand::kPackedHalves || operand == Operand::kPackedMul1;
}

struct Rotated {
  // Fragments: [k tiles, whole blocks of 8][eights of rows][32 lanes][1 or 2 words].
  // Swizzled: [blocks of 64 inputs][eights of rows][8 rows][128 bytes].
  uint32_t* x;
  int row_groups;      // eights of rows, those without a row included
  float* row_scales;   // [rows], powers of two
  float* scales;       // integers: [blocks of 128 inputs][8]
  float* corrections;  // integers: what the constant part of mul1's values adds, the same layout
  unsigned* arrived;   // counters of the second launch, zeroed here
  int64_t counters;
};

// `rows`: how many rows to write; zeros beyond g.m.
cudaError_t launch_rotate(const Gemm& g, const Rotated& to, Operand operand, int64_t rows,
                          cudaStream_t stream);

}  // namespace trellis::cuda
