// Around the tiles: rows rotated before gate and up, the activation between, tokens added up behind
// (../gemm/rotate_row.cuh).
#include "../gemm/launch.cuh"
#include "../gemm/rotate_row.cuh"
#include "routes.h"
#include "vectors.cuh"

namespace trellis::cuda {
namespace {

constexpr int kAddWarps = 4;  // of a block that adds routes up

// FP16 and BF16 are loaded eight at a time, FP32 four.
using XLanes = Lanes<8, 4>;
using SumLanes = Lanes<4, 4>;

// A lane's part of the 128 sums that begin at `p`.
__device__ __forceinline__ void load_sums(const float* p, SumLanes::Values& v) {
  p += SumLanes::feature();
#pragma unroll
  for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
    const float4 four = __ldcg(reinterpret_cast<const float4*>(p + unit * SumLanes::kApart));
    v[unit][0] = four.x, v[unit][1] = four.y, v[unit][2] = four.z, v[unit][3] = four.w;
  }
}

__device__ __forceinline__ uint2 four_halves(const __half* p) {
  if (reinterpret_cast<uintptr_t>(p) % 8 == 0) return *reinterpret_cast<const uint2*>(p);
  const auto* const bits = reinterpret_cast<const uint16_t*>(p);
  return uint2{bits[0] | uint32_t{bits[1]} << 16, bits[2] | uint32_t{bits[3]} << 16};
}

// A warp's sums of the features from `block` on become results of the layer, as finish_linear has it.
__device__ __forceinline__ void finish_sums(const Projection& p, int64_t matrix, int block,
                                            SumLanes::Values& z) {
  const __half* const svh = vector_of(p.svh, matrix) + block + SumLanes::feature();
  uint2 scale[SumLanes::kUnits];  // before the transform, which the memory answers meanwhile
#pragma unroll
  for (int unit = 0; unit < SumLanes::kUnits; ++unit)
    scale[unit] = four_halves(svh + unit * SumLanes::kApart);
  SumLanes::transform(z, kHadamardScale);
#pragma unroll
  for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
    const float2 first = pair_of(scale[unit].x, __half{}),
                 second = pair_of(scale[unit].y, __half{});
    z[unit][0] *= first.x, z[unit][1] *= first.y, z[unit][2] *= second.x, z[unit][3] *= second.y;
  }
}

__device__ __forceinline__ void add_biases(const Stack& bias, int64_t row, int block,
                                           SumLanes::Values& z) {
#pragma unroll
  for (int unit = 0; unit < SumLanes::kUnits; ++unit)
    add_bias(bias, row, block + SumLanes::feature() + unit * SumLanes::kApart, z[unit]);
}

// A slot of one slice, which is the row of a block.
struct Slot {
  int64_t slot, slice;
  int route;  // -1: padding
  int64_t token, expert;
  bool there;

  __device__ Slot(const Moe& m, const MoeScratch& s)
      : slot(blockIdx.x), slice(blockIdx.y), route(s.route[slot]), there(slot < s.count[1]) {
    token = static_cast<uint32_t>(max(route, 0)) / static_cast<uint32_t>(m.top_k);
    expert = there && route >= 0 ? expert_of_route(m, route) : 0;
  }
};

// Rows of padding are zeros, so that tiles read nothing that was never written. Where gate and up scale their
// inputs by different suh, one rotation after the other.
__global__ void __launch_bounds__(kRowWarps * 32)
    rotate_slots(const Moe m, const MoeScratch s, const int terms) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Slot slot(m, s);
  if (!slot.there) return;
  const int64_t columns = slot.route < 0 ? 0 : m.columns;
  const auto load = [=](int block, XLanes::Values& v) {
    with_dtype(m.x_dtype, m.x, [&](const auto* all) {
      const int first = block + XLanes::feature();
      const auto* const x = all + slot.token * m.columns + first;
      const bool wide = reinterpret_cast<uintptr_t>(x) % 16 == 0;
#pragma unroll
      for (int unit = 0; unit < XLanes::kUnits; ++unit) {
        const int64_t left = columns - first - unit * XLanes::kApart;
        const auto* const at = x + unit * XLanes::kApart;
        if (left >= XLanes::kNeighbours || left <= 0) {
          load_neighbours(at, wide, left > 0, v[unit]);
        } else {
#pragma unroll
          for (int i = 0; i < XLanes::kNeighbours; ++i)
            v[unit][i] = i < left ? to_float(at[i]) : 0.0f;
        }
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
    const auto write = [=](int column, XLanes::Values& v) {
      write_atoms<XLanes>(v, atoms + column / 64 * step_bytes, step_bytes, slot.slot, terms);
    };
    const Projection& p = rotations == 2 && rotation == 0 ? m.gate : m.up;
    const int exponent = rotate_row<XLanes>(vector_of(p.suh, slot.expert * m.slices + slot.slice),
                                            blocks, rotation == 1, load, write);
    if (threadIdx.x == 0) s.x_scales[place * s.slots + slot.slot] = power_of_two(exponent);
  }
}

__global__ void __launch_bounds__(kRowWarps * 32)
    activate_slots(const Moe m, const MoeScratch s, const int terms) {
  let_next_kernel_start();
  wait_for_previous_kernel();
  const Slot slot(m, s);
  if (!slot.there) return;
  const int64_t matrix = slot.expert * m.slices + slot.slice;
  const bool gated = m.gate.suh.data != nullptr;
  const float* const sums = s.sums + (slot.slice * 2 * s.slots + slot.slot) * m.inner;
  const auto load = [=](int block, SumLanes::Values& u) {
    SumLanes::Values g = {};
    if (slot.route < 0) {
#pragma unroll
      for (auto& unit : u) {
#pragma unroll
        for (float& value : unit) value = 0.0f;
      }
      return;
    }
    load_sums(sums + s.slots * m.inner + block, u);
    if (gated) load_sums(sums + block, g);
    finish_sums(m.up, matrix, block, u);
    add_biases(m.up.bias, matrix, block, u);
    if (gated) {
      finish_sums(m.gate, matrix, block, g);
      add_biases(m.gate.bias, matrix, block, g);
    }
#pragma unroll
    for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
      activate(m, g[unit], u[unit]);
      const int first = block + SumLanes::feature() + unit * SumLanes::kApart;
#pragma unroll
      for (int i = 0; i < SumLanes::kNeighbours; ++i)
        if (first + i >= m.intermediate) u[unit][i] = 0.0f;
    }
  };
  const int blocks = static_cast<int>(m.inner / 128);
  const int64_t step_bytes = s.slots / 8 * terms * 1024;
  char* const atoms = reinterpret_cast<char*>(s.inner) + slot.slice * blocks * 2 * step_bytes +
                      slot.slot / 8 * terms * 1024;
  const auto write = [=](int column, SumLanes::Values& v) {
    write_atoms<SumLanes>(v, atoms + column / 64 * step_bytes, step_bytes, slot.slot, terms);
  };
  const int exponent =
      rotate_row<SumLanes>(vector_of(m.down.suh, matrix), blocks, false, load, write);
  if (threadIdx.x == 0) s.inner_scales[slot.slice * s.slots + slot.slot] = power_of_two(exponent);
}

// A warp a token and 512 features of y: transforms, weights, biases and sums in the order of slots and slices. The next
// sums are on their way while some are added.
__global__ void __launch_bounds__(kAddWarps * 32, 5) add_slots(const Moe m, const MoeScratch s) {
  const int lane = threadIdx.x % 32, slices = static_cast<int>(m.slices);
  const int groups = static_cast<int>((m.hidden + 511) / 512);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kAddWarps + threadIdx.x / 32;
  const int64_t token = at / groups;
  const int block = static_cast<int>(at - token * groups) * 512 + SumLanes::block() * 128;
  const bool valid = block < m.hidden;
  const int mine = valid ? block : 0;  // what lanes beyond the end go through the motions with
  wait_for_previous_kernel();
  if (token >= m.tokens) return;
  SumLanes::Values sums = {};
  for (int64_t base = 0; base < m.top_k; base += 32) {
    // A lane a route, in front of those that need what it finds.
    const int64_t own = token * m.top_k + base + lane;
    const int own_slot = base + lane < m.top_k ? s.slot[own] : -1;
    const int own_expert = own_slot >= 0 ? static_cast<int>(expert_of_route(m, own)) : 0;
    const float own_weight = own_slot >= 0 ? load_as_float(m.weights, m.weights_dtype, own) : 0.0f;
    SumLanes::Values next;
    const auto load_next = [&](int route, int slice) {
      const int slot = __shfl_sync(0xFFFFFFFFu, own_slot, route);
      load_sums(s.results + (slice * s.slots + slot) * m.hidden + mine, next);
    };
    unsigned left = __ballot_sync(0xFFFFFFFFu, own_slot >= 0);
    if (left != 0) load_next(__ffs(static_cast<int>(left)) - 1, 0);
    while (left != 0) {
      const int route = __ffs(static_cast<int>(left)) - 1;
      left &= left - 1;
      const int64_t expert = __shfl_sync(0xFFFFFFFFu, own_expert, route);
      SumLanes::Values value = {};
#pragma unroll 1
      for (int slice = 0; slice < slices; ++slice) {
        SumLanes::Values z;
#pragma unroll
        for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
#pragma unroll
          for (int i = 0; i < SumLanes::kNeighbours; ++i) z[unit][i] = next[unit][i];
        }
        if (slice + 1 < slices)
          load_next(route, slice + 1);
        else if (left != 0)
          load_next(__ffs(static_cast<int>(left)) - 1, 0);
        finish_sums(m.down, expert * slices + slice, mine, z);
#pragma unroll
        for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
#pragma unroll
          for (int i = 0; i < SumLanes::kNeighbours; ++i) value[unit][i] += z[unit][i];
        }
      }
      const float weight = __shfl_sync(0xFFFFFFFFu, own_weight, route);
      add_biases(m.down.bias, expert, mine, value);
#pragma unroll
      for (int unit = 0; unit < SumLanes::kUnits; ++unit) {
#pragma unroll
        for (int i = 0; i < SumLanes::kNeighbours; ++i)
          sums[unit][i] = fmaf(weight, value[unit][i], sums[unit][i]);
      }
    }
  }
  if (!valid) return;
#pragma unroll
  for (int unit = 0; unit < SumLanes::kUnits; ++unit)
    write_y(m, token, block + SumLanes::feature() + unit * SumLanes::kApart, sums[unit]);
}

// A block for each row, of so many 128-blocks.
template <typename Lanes, typename... Parameters, typename... Arguments>
cudaError_t launch_rows(void (*kernel)(Parameters...), int64_t blocks, dim3 grid,
                        cudaStream_t stream, Arguments... arguments) {
  const cudaError_t error = prefer_shared(kernel);
  if (error != cudaSuccess) return error;
  return launch_overlapping_grid(kernel, grid, row_threads<Lanes>(blocks), 0, 1, stream,
                                 arguments...);
}

dim3 grid_of(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

cudaError_t launch_rotate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                cudaStream_t stream) {
  return launch_rows<XLanes>(rotate_slots, m.hidden / 128, grid_of(scratch.slots, m.slices), stream,
                             m, scratch, terms);
}

cudaError_t launch_activate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                  cudaStream_t stream) {
  return launch_rows<SumLanes>(activate_slots, m.inner / 128, grid_of(scratch.slots, m.slices),
                               stream, m, scratch, terms);
}

cudaError_t launch_add_slots(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  const cudaError_t error = prefer_shared(add_slots);
  if (error != cudaSuccess) return error;
  const int64_t warps = m.tokens * ((m.hidden + 511) / 512);
  return launch_overlapping(add_slots, (warps + kAddWarps - 1) / kAddWarps, kAddWarps * 32, 0, 1,
                            stream, m, scratch);
}

}  // namespace trellis::cuda
