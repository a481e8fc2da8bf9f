// The value of every trellis state.
#pragma once

namespace trellis {

// Ids as the op schemas carry them.
enum Codebook { kInst3 = 0, kMcg = 1, kMul1 = 2, kSqgE4m3 = 3, kSqgFp16 = 4, kCodebooks = 5 };

// 65,536 values (FP16 numbers held as float, 64-byte aligned), built on first use and kept. `bits`
// is the rate; only the sqg codebooks depend on it.
const float* codebook_values(int codebook, int bits);

}  // namespace trellis
