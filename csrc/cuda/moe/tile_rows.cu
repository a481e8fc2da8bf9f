// Around the tiles: rows rotated before gate and up, the activation between, tokens added up behind. A block
// works on a slot, a warp on 128 features of it.
#include "../gemm/launch.cuh"
#include "routes.h"
#include "vectors.cuh"

namespace trellis::cuda {
namespace {

constexpr int kRowWarps = 4;

__device__ __forceinline__ float block_max(float value) {
  __shared__ float of_warps[kRowWarps];
  value = warp_max(value);
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return warp_max(of_warps[threadIdx.x % kRowWarps]);
}

// H(v * suh) of a warp's 128 values into the swizzled atoms of row `slot`, in `terms` FP16 numbers each.
__device__ __forceinline__ void write_atoms(const float (&v)[4], const __half* suh, int exponent,
                                            char* atoms, int64_t step_bytes, int block,
                                            int64_t slot, int terms) {
  const int lane = threadIdx.x % 32;
  float z[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    z[i] = v[i] * power_of_two(-exponent) * __half2float(suh[block * 128 + lane * 4 + i]);
  warp_hadamard(z, lane);
#pragma unroll
  for (float& value : z) value *= kHadamardScale;
  const int within = static_cast<int>(slot % 8), piece = lane % 16 / 2 ^ within;
  char* at = atoms + (block * 2 + lane / 16) * step_bytes + slot / 8 * terms * 1024 + within * 128 +
             piece * 16 + lane % 2 * 8;
  for (int term = 0; term < terms; ++term, at += 1024) {
    const __half2 first = __floats2half2_rn(z[0], z[1]), second = __floats2half2_rn(z[2], z[3]);
    *reinterpret_cast<uint2*>(at) =
        uint2{reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second)};
    z[0] -= __low2float(first), z[1] -= __high2float(first);
    z[2] -= __low2float(second), z[3] -= __high2float(second);
  }
}

__device__ __forceinline__ float largest(const float (&v)[4], const __half* suh, int block) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    most = fmaxf(most, fabsf(v[i] * __half2float(suh[block * 128 + threadIdx.x % 32 * 4 + i])));
  return most;
}

// 128-blocks that a warp loads at a time, for their latencies to overlap.
constexpr int kTogether = 4;

// f(first) for each such group of this warp's: first, first + kRowWarps, ..., of which the last may not be there.
template <typename F>
__device__ __forceinline__ void for_blocks(int blocks, F f) {
#pragma unroll 1
  for (int first = threadIdx.x / 32; first < blocks; first += kTogether * kRowWarps) f(first);
}

// blockIdx.y: slice and rotation. Rows of padding are zeros, so that tiles read nothing that was never written.
__global__ void __launch_bounds__(kRowWarps * 32)
    rotate_slots(const Moe m, const MoeScratch s, const int rotations, const int terms) {
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int blocks = static_cast<int>(m.hidden / 128);
  const int slice = static_cast<int>(blockIdx.y) / rotations;
  const int rotation = static_cast<int>(blockIdx.y) % rotations;
  const int64_t slot = blockIdx.x;
  wait_for_previous_kernel();
  const int slots = s.count[1], route = s.route[slot];
  if (slot >= slots) return;
  const int64_t token = max(route, 0) / m.top_k;
  const int64_t expert = route < 0 ? 0 : expert_of_route(m, route);
  const Projection& p = rotations == 2 && rotation == 0 ? m.gate : m.up;
  const __half* const suh = vector_of(p.suh, expert * m.slices + slice);
  const auto load = [&](int first, float (&v)[kTogether][4]) {
    with_dtype(m.x_dtype, m.x, [&](const auto* x) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int column = (first + j * kRowWarps) * 128 + lane * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i)
          v[j][i] = route >= 0 && column + i < m.columns
                        ? to_float(x[token * m.columns + column + i])
                        : 0.0f;
      }
    });
  };
  float most = 0.0f;
  for_blocks(blocks, [&](int first) {
    float v[kTogether][4];
    load(first, v);
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      most = fmaxf(most, largest(v[j], suh, min(first + j * kRowWarps, blocks - 1)));
  });
  const int exponent = exponent_of(block_max(most));
  const int64_t place = blockIdx.y, step_bytes = s.slots / 8 * terms * 1024;
  char* const atoms = reinterpret_cast<char*>(s.x) + place * blocks * 2 * step_bytes;
  for_blocks(blocks, [&](int first) {
    float v[kTogether][4];
    load(first, v);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int block = first + j * kRowWarps;
      if (block < blocks) write_atoms(v[j], suh, exponent, atoms, step_bytes, block, slot, terms);
    }
  });
  if (threadIdx.x == 0) s.x_scales[place * s.slots + slot] = power_of_two(exponent);
}

// blockIdx.y: slice.
__global__ void __launch_bounds__(kRowWarps * 32)
    activate_slots(const Moe m, const MoeScratch s, const int terms) {
  extern __shared__ float4 kept[];  // [inner / 4]
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int blocks = static_cast<int>(m.inner / 128);
  const int64_t slot = blockIdx.x, slice = blockIdx.y;
  wait_for_previous_kernel();
  const int slots = s.count[1], route = s.route[slot];
  if (slot >= slots) return;
  const int64_t expert = route < 0 ? 0 : expert_of_route(m, route);
  const int64_t matrix = expert * m.slices + slice;
  const __half* const suh = vector_of(m.down.suh, matrix);
  const bool gated = m.gate.suh.data != nullptr;
  float most = 0.0f;
  for_blocks(blocks, [&](int first) {
    float u[kTogether][4] = {}, g[kTogether][4] = {};
    const auto load = [&](int which, float (&z)[kTogether][4]) {
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        const int block = min(first + j * kRowWarps, blocks - 1);
        const float4 sum = __ldcg(reinterpret_cast<const float4*>(
            s.sums + ((slice * 2 + which) * s.slots + slot) * m.inner + block * 128 + lane * 4));
        z[j][0] = sum.x, z[j][1] = sum.y, z[j][2] = sum.z, z[j][3] = sum.w;
      }
    };
    if (route >= 0) {
      load(1, u);
      if (gated) load(0, g);
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int block = first + j * kRowWarps;
      if (block >= blocks) break;
      const int feature = block * 128 + lane * 4;
      if (route >= 0) {
        finish_linear(m.up, matrix, feature, u[j]);
        add_bias(m.up.bias, matrix, feature, u[j]);
        if (gated) {
          finish_linear(m.gate, matrix, feature, g[j]);
          add_bias(m.gate.bias, matrix, feature, g[j]);
        }
        activate(m, g[j], u[j]);
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (feature + i >= m.intermediate) u[j][i] = 0.0f;
      }
      kept[block * 32 + lane] = float4{u[j][0], u[j][1], u[j][2], u[j][3]};
      most = fmaxf(most, largest(u[j], suh, block));
    }
  });
  const int exponent = exponent_of(block_max(most));
  const int64_t step_bytes = s.slots / 8 * terms * 1024;
  char* const atoms = reinterpret_cast<char*>(s.inner) + slice * blocks * 2 * step_bytes;
  for_blocks(blocks, [&](int first) {
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int block = first + j * kRowWarps;
      if (block >= blocks) break;
      const float4 value = kept[block * 32 + lane];
      write_atoms({value.x, value.y, value.z, value.w}, suh, exponent, atoms, step_bytes, block,
                  slot, terms);
    }
  });
  if (threadIdx.x == 0) s.inner_scales[slice * s.slots + slot] = power_of_two(exponent);
}

// A warp a token and 128 features of y: transforms, weights, biases and sums in the order of slots and slices.
__global__ void __launch_bounds__(kRowWarps * 32) add_slots(const Moe m, const MoeScratch s) {
  const int lane = threadIdx.x % 32;
  const int blocks = static_cast<int>(m.hidden / 128);
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kRowWarps + threadIdx.x / 32;
  const int64_t token = at / blocks;
  const int feature = static_cast<int>(at - token * blocks) * 128 + lane * 4;
  wait_for_previous_kernel();
  if (token >= m.tokens) return;
  float sums[4] = {};
  for (int64_t first = 0; first < m.top_k; first += kTogether) {
    int slot[kTogether];
    int64_t expert[kTogether];
    float value[kTogether][4] = {};
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      const int64_t route = token * m.top_k + first + j;
      slot[j] = first + j < m.top_k ? s.slot[route] : -1;
      expert[j] = slot[j] >= 0 ? expert_of_route(m, route) : 0;
    }
    for (int64_t slice = 0; slice < m.slices; ++slice) {
      float4 sum[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; ++j)
        sum[j] = __ldcg(reinterpret_cast<const float4*>(
            s.results + (slice * s.slots + max(slot[j], 0)) * m.hidden + feature));
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (slot[j] < 0) continue;
        float z[4] = {sum[j].x, sum[j].y, sum[j].z, sum[j].w};
        finish_linear(m.down, expert[j] * m.slices + slice, feature, z);
#pragma unroll
        for (int i = 0; i < 4; ++i) value[j][i] += z[i];
      }
    }
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (slot[j] < 0) continue;
      add_bias(m.down.bias, expert[j], feature, value[j]);
      const float weight = load_as_float(m.weights, m.weights_dtype, token * m.top_k + first + j);
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[i] = fmaf(weight, value[j][i], sums[i]);
    }
  }
  write_y(m, token, feature, sums);
}

dim3 grid_of(int64_t x, int64_t y) {
  return dim3(static_cast<unsigned>(x), static_cast<unsigned>(y));
}

}  // namespace

cudaError_t launch_rotate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                cudaStream_t stream) {
  const cudaError_t error = prefer_shared(rotate_slots);
  if (error != cudaSuccess) return error;
  const int rotations = one_rotation(m) ? 1 : 2;
  return launch_overlapping_grid(rotate_slots, grid_of(scratch.slots, m.slices * rotations),
                                 kRowWarps * 32, 0, 1, stream, m, scratch, rotations, terms);
}

cudaError_t launch_activate_slots(const Moe& m, const MoeScratch& scratch, int terms,
                                  cudaStream_t stream) {
  const cudaError_t error = prefer_shared(activate_slots);
  if (error != cudaSuccess) return error;
  return launch_overlapping_grid(activate_slots, grid_of(scratch.slots, m.slices), kRowWarps * 32,
                                 static_cast<int>(m.inner * 4), 1, stream, m, scratch, terms);
}

cudaError_t launch_add_slots(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  const cudaError_t error = prefer_shared(add_slots);
  if (error != cudaSuccess) return error;
  const int64_t warps = m.tokens * (m.hidden / 128);
  return launch_overlapping(add_slots, (warps + kRowWarps - 1) / kRowWarps, kRowWarps * 32, 0, 1,
                            stream, m, scratch);
}

}  // namespace trellis::cuda
