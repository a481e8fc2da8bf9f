// The value of every trellis state.
#pragma once

#include <cstdint>

#include "numeric.h"

namespace trellis {

// Ids as the op schemas carry them.
enum Codebook { kInst3 = 0, kMcg = 1, kMul1 = 2, kSqgE4m3 = 3, kSqgFp16 = 4, kCodebooks = 5 };

// 3inst, mcg, mul1: a state's hash is state * multiplier + addend. The value is
//   3inst, mcg  the sum of the two FP16 halves of (hash & kHalvesAnd) ^ kHalvesXor
//   mul1        (1024 + the sum of the hash's four bytes) * kMul1Scale - kMul1Shift
// and rounded to FP16.
struct Hash {
  uint32_t multiplier, addend;
};

TRELLIS_ANYWHERE constexpr Hash hash_of(int codebook) {
  return codebook == kInst3 ? Hash{89226354u, 64248484u}
         : codebook == kMcg ? Hash{0xCBAC1FEDu, 0u}
                            : Hash{0x83DCD12Du, 0u};
}

constexpr uint32_t kHalvesAnd = 0x8FFF8FFFu, kHalvesXor = 0x3B603B60u;
constexpr float kMul1Scale = 0.00676727294921875f, kMul1Shift = 10.3828125f;
// What is left beside the bytes.
constexpr float kMul1Offset = 1024.0f * kMul1Scale - kMul1Shift;

// 65,536 values (FP16 numbers held as float, 64-byte aligned), built on first use and kept. `bits`
// is the rate; only the sqg codebooks depend on it.
const float* codebook_values(int codebook, int bits);

}  // namespace trellis
