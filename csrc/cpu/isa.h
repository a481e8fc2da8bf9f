// Which instruction sets this processor can run, and the kernels written for each.
#pragma once

#include <cstdint>

#include "layer.h"
#include "search.h"

namespace trellis {

// Slowest to fastest; the order of trellis_ops/cli/env.py and of the tests.
enum Isa { kGeneric = 0, kAvx2 = 1, kAvx512 = 2 };

// Bit i set: Isa i can run here.
int64_t available_isas();

Isa best_isa();

SearchTile search_kernel(Isa isa);
const SlabKernels& slab_kernels(Isa isa);
// Those whose error with a codebook is so small that it hardly counts where a second layer follows.
const SlabKernels& exact_slab_kernels(Isa isa, int codebook);

}  // namespace trellis
