// Which instruction sets this processor can run, and the kernels written for each.
#pragma once

#include <cstdint>

#include "layer.h"
#include "search.h"

namespace trellis {

// Slowest to fastest; the order of trellis_ops/cli/env.py and of the tests.
enum Isa { kGeneric, kAvx2, kAvx512, kAvx512Vnni, kAvx512Fp16, kAmx, kNeon };

// Bit i set: Isa i can run here.
int64_t available_isas();

Isa best_isa();

// Accuracy of the activations, as meta/checks.py numbers it.
enum Act { kExact = 0, kInt8 = 1 };

// What gemm runs on for so many rows, where best_isa() is asked for.
Isa gemm_isa(int64_t rows);

SearchTile search_kernel(Isa isa);
const SlabKernels& slab_kernels(Isa isa);
// With an Act that allows more than kernels make use of for so many rows, others are as exact as ever.
const SlabKernels& slab_kernels(Isa isa, Act act, int64_t rows);
// Those whose error with a codebook is so small that it hardly counts where a second layer follows.
const SlabKernels& exact_slab_kernels(Isa isa, int codebook);

}  // namespace trellis
