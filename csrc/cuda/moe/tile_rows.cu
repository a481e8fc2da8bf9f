// Around the tiles: rows rotated before gate and up, the activation between, tokens added up behind. A lane has
// 16 neighbours of a row, eight lanes a block of 128 (../gemm/rotate_row.cuh).
#include "../gemm/launch.cuh"
#include "../gemm/rotate_row.cuh"
#include "routes.h"
#include "vectors.cuh"

namespace trellis::cuda {
namespace {

constexpr int kAddWarps = 4;  // of a block that adds routes up
constexpr int kAddTogether =
    2;  // routes that a warp loads at a time, for their latencies to overlap

__device__ __forceinline__ void load_sums(const float* p, float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(p) + i);
    v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
  }
}

// A warp's sums become results of the layer, as finish_linear has it.
__device__ __forceinline__ void finish_sixteen(const Projection& p, int64_t matrix, int feature,
                                               float (&z)[16]) {
#pragma unroll
  for (float& value : z) value *= kHadamardScale;  // first: the transform adds up 128 of them
  lanes_hadamard(z, threadIdx.x % 32);
  const __half* const svh = vector_of(p.svh, matrix) + feature;
  float scale[16];
  load_sixteen(svh, reinterpret_cast<uintptr_t>(svh) % 16 == 0, scale);
#pragma unroll
  for (int i = 0; i < 16; ++i) z[i] *= scale[i];
}

// A slot of one slice, which is the row of a block.
struct Slot {
  int64_t slot, slice;
  int route;  // -1: padding
  int64_t token, expert;
  bool there;

  __device__ Slot(const Moe& m, const MoeScratch& s)
      : slot(blockIdx.x), slice(blockIdx.y), route(s.route[slot]), there(slot < s.count[1]) {
    token = max(route, 0) / m.top_k;
    expert = there && route >= 0 ? expert_of_route(m, route) : 0;
  }
};

// Rows of padding are zeros, so that tiles read nothing that was never written. Where gate and up scale their
// inputs by different suh, one rotation after the other.
__global__ void __launch_bounds__(kRowWarps * 32, 2)
    rotate_slots(const Moe m, const MoeScratch s, const int terms) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Slot slot(m, s);
  if (!slot.there) return;
  const int64_t columns = slot.route < 0 ? 0 : m.columns;
  const auto load = [&](int column, float (&v)[16]) {
    with_dtype(m.x_dtype, m.x, [&](const auto* all) {
      const auto* const x = all + slot.token * m.columns + column;
      if (column + 16 <= columns) {
        load_sixteen(x, reinterpret_cast<uintptr_t>(x) % 16 == 0, v);
      } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
          if (column + i < columns) v[i] = to_float(x[i]);
      }
    });
  };
  const int blocks = static_cast<int>(m.hidden / 128), rotations = one_rotation(m) ? 1 : 2;
  const int64_t step_bytes = s.slots / 8 * terms * 1024;
#pragma unroll 1
  for (int rotation = 0; rotation < rotations; ++rotation) {
    const int64_t place = slot.slice * rotations + rotation;
    char* const atoms = reinterpret_cast<char*>(s.x) + place * blocks * 2 * step_bytes +
                        slot.slot / 8 * terms * 1024;
    const auto write = [&](int column, float (&v)[16]) {
      write_atoms(v, atoms + column / 64 * step_bytes, slot.slot, column, terms);
    };
    const Projection& p = rotations == 2 && rotation == 0 ? m.gate : m.up;
    const int exponent =
        rotate_row(vector_of(p.suh, slot.expert * m.slices + slot.slice), blocks, load, write);
    if (threadIdx.x == 0) s.x_scales[place * s.slots + slot.slot] = power_of_two(exponent);
  }
}

__global__ void __launch_bounds__(kRowWarps * 32, 2)
    activate_slots(const Moe m, const MoeScratch s, const int terms) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Slot slot(m, s);
  if (!slot.there) return;
  const int64_t matrix = slot.expert * m.slices + slot.slice;
  const bool gated = m.gate.suh.data != nullptr;
  const float* const sums = s.sums + (slot.slice * 2 * s.slots + slot.slot) * m.inner;
  const auto load = [&](int feature, float (&u)[16]) {
    if (slot.route < 0) return;
    float g[16] = {};
    load_sums(sums + s.slots * m.inner + feature, u);
    if (gated) load_sums(sums + feature, g);
    finish_sixteen(m.up, matrix, feature, u);
    add_bias(m.up.bias, matrix, feature, u);
    if (gated) {
      finish_sixteen(m.gate, matrix, feature, g);
      add_bias(m.gate.bias, matrix, feature, g);
    }
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const float gate[4] = {g[i], g[i + 1], g[i + 2], g[i + 3]};
      float up[4] = {u[i], u[i + 1], u[i + 2], u[i + 3]};
      activate(m, gate, up);
#pragma unroll
      for (int j = 0; j < 4; ++j) u[i + j] = feature + i + j < m.intermediate ? up[j] : 0.0f;
    }
  };
  const int blocks = static_cast<int>(m.inner / 128);
  const int64_t step_bytes = s.slots / 8 * terms * 1024;
  char* const atoms = reinterpret_cast<char*>(s.inner) + slot.slice * blocks * 2 * step_bytes +
                      slot.slot / 8 * terms * 1024;
  const auto write = [&](int column, float (&v)[16]) {
    write_atoms(v, atoms + column / 64 * step_bytes, slot.slot, column, terms);
  };
  const int exponent = rotate_row(vector_of(m.down.suh, matrix), blocks, load, write);
  if (threadIdx.x == 0) s.inner_scales[slot.slice * s.slots + slot.slot] = power_of_two(exponent);
}

// A warp a token and 512 features of y: transforms, weights, biases and sums in the order of slots and slices.
__global__ void __launch_bounds__(kAddWarps * 32, 4) add_slots(const Moe m, const MoeScratch s) {
  const int lane = threadIdx.x % 32;
  const int groups = static_cast<int>((m.hidden + 511) / 512);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kAddWarps + threadIdx.x / 32;
  const int64_t token = at / groups;
  const int feature = static_cast<int>(at - token * groups) * 512 + lane * 16;
  const bool valid = feature < m.hidden;
  const int mine = valid ? feature : 0;  // what lanes beyond the end go through the motions with
  wait_for_previous_kernel();
  if (token >= m.tokens) return;
  float sums[16] = {};
  for (int64_t base = 0; base < m.top_k; base += 32) {
    // A lane a route, in front of those that need what it finds.
    const int64_t own = token * m.top_k + base + lane;
    const bool has = base + lane < m.top_k;
    const int own_slot = has ? s.slot[own] : -1;
    const int own_expert = own_slot >= 0 ? static_cast<int>(expert_of_route(m, own)) : 0;
    const float own_weight = has ? load_as_float(m.weights, m.weights_dtype, own) : 0.0f;
    const int count = static_cast<int>(min(static_cast<int64_t>(32), m.top_k - base));
    for (int first = 0; first < count; first += kAddTogether) {
      int slot[kAddTogether];
      float value[kAddTogether][16] = {};
#pragma unroll
      for (int j = 0; j < kAddTogether; ++j)
        slot[j] = first + j < count ? __shfl_sync(0xFFFFFFFFu, own_slot, first + j) : -1;
      for (int64_t slice = 0; slice < m.slices; ++slice) {
        float z[kAddTogether][16];
#pragma unroll
        for (int j = 0; j < kAddTogether; ++j)
          load_sums(s.results + (slice * s.slots + max(slot[j], 0)) * m.hidden + mine, z[j]);
#pragma unroll
        for (int j = 0; j < kAddTogether; ++j) {
          if (slot[j] < 0) continue;
          const int64_t expert = __shfl_sync(0xFFFFFFFFu, own_expert, first + j);
          finish_sixteen(m.down, expert * m.slices + slice, mine, z[j]);
#pragma unroll
          for (int i = 0; i < 16; ++i) value[j][i] += z[j][i];
        }
      }
#pragma unroll
      for (int j = 0; j < kAddTogether; ++j) {
        if (slot[j] < 0) continue;
        const int64_t expert = __shfl_sync(0xFFFFFFFFu, own_expert, first + j);
        const float weight = __shfl_sync(0xFFFFFFFFu, own_weight, first + j);
        add_bias(m.down.bias, expert, mine, value[j]);
#pragma unroll
        for (int i = 0; i < 16; ++i) sums[i] = fmaf(weight, value[j][i], sums[i]);
      }
    }
  }
  if (!valid) return;
  const int64_t to = token * m.columns + feature;
  const int size = m.y_dtype == DType::Float ? 4 : 2;
  if (feature + 16 <= m.columns && (reinterpret_cast<uintptr_t>(m.y) + to * size) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < 16; i += 8) {
      float eight[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) eight[j] = sums[i + j] * m.routed_scale;
      store_eight(m.y, m.y_dtype, to + i, eight);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 16; i += 4)
    write_y(m, token, feature + i, {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]});
}

// A block for each row, of so many 128-blocks.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), int64_t blocks, dim3 grid,
                        cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = prefer_shared(kernel);
  if (error != cudaSuccess) return error;
  return launch_overlapping_grid(kernel, grid, row_threads(blocks), 0, 1, stream, arguments...);
}

dim3 grid_of(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

cudaError_t launch_rotate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                cudaStream_t stream) {
  return launch_rows(rotate_slots, m.hidden / 128, grid_of(scratch.slots, m.slices), stream, m,
                     scratch, terms);
}

cudaError_t launch_activate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                  cudaStream_t stream) {
  return launch_rows(activate_slots, m.inner / 128, grid_of(scratch.slots, m.slices), stream, m,
                     scratch, terms);
}

cudaError_t launch_add_slots(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  const cudaError_t error = prefer_shared(add_slots);
  if (error != cudaSuccess) return error;
  const int64_t warps = m.tokens * ((m.hidden + 511) / 512);
  return launch_overlapping(add_slots, (warps + kAddWarps - 1) / kAddWarps, kAddWarps * 32, 0, 1,
                            stream, m, scratch);
}

}  // namespace trellis::cuda
