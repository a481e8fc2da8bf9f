// Routed experts on the CPU. No torch headers: moe_bindings.cpp passes plain pointers.
#pragma once

#include <cstdint>

#include "isa.h"
#include "numeric.h"

namespace trellis {

// As meta/moe_checks.py numbers them.
enum Activation { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu2 = 3, kSwigluOai = 4 };

// Vectors or biases of all slices: slice r of expert e has row (e * slices + r) % rows.
struct Stack {
  const void* data;  // null: there is none
  DType dtype;
  int64_t rows, columns;
};

struct Projection {
  Stack suh, svh, bias;
  int codebook;
};

// The op's arguments, all contiguous.
struct Moe {
  const void* x;
  DType x_dtype;
  int64_t tokens, columns;  // of x, and of y
  const void* ids;
  bool wide_ids;  // int64 rather than int32
  const void* weights;
  DType weights_dtype;
  int64_t top_k;
  const int16_t* packed;
  int64_t packed_words;
  const int64_t* table;  // [3][experts][slices][2]: offset in packed and words of a tile
  int64_t experts, slices;
  Projection gate, up, down;  // gate's stacks are null where the activation has none
  int64_t hidden, inner;      // padded
  int64_t intermediate;       // what reaches down, of a slice
  int activation;
  float limit;
  bool limit_after;
  float routed_scale;
  void* y;
  DType y_dtype;
};

// Whether one rotation of a row serves gate and up: they have the very same vectors, or there is no gate.
TRELLIS_ANYWHERE inline bool one_rotation(const Moe& m) {
  return m.gate.suh.data == nullptr ||
         (m.gate.suh.data == m.up.suh.data && m.gate.suh.rows == m.up.suh.rows);
}

// Scratch for that many tokens; it does not shrink as an argument grows. Sizes are padded ones.
int64_t moe_workspace_bytes(int64_t tokens, int64_t top_k, int64_t experts, int64_t hidden,
                            int64_t inner);

// Throws std::runtime_error where the table has no valid matrix for an expert that is hit.
// A row of y does not depend on the number of threads, nor on the other rows, but for whether its experts
// have more of them than the kernel's few_rows.
void moe(Isa isa, const Moe& m, void* workspace);

}  // namespace trellis
