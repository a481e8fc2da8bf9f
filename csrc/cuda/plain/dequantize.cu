// One block decodes 128 inputs by 128 outputs into shared memory, transforms both ways and scales.
#include "../../cpu/codebook_math.h"
#include "../decode/decode.cuh"
#include "../gemm/launch.cuh"
#include "../gemm/rows.cuh"
#include "plain.h"

namespace trellis::cuda {
namespace {

constexpr int kSide = 128, kStride = kSide + 1;  // floats; neighbours down a column in other banks
constexpr int kShared = kSide * kStride * 4;

template <int kTileWords>
__global__ void __launch_bounds__(256) dequantize(const Gemm g) {
  extern __shared__ float block[];  // [input][output]
  using W = Window<kTileWords>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t in_tile = static_cast<int64_t>(blockIdx.y) * 8;
  const int64_t out_tile = static_cast<int64_t>(blockIdx.x) * 8;
  const W window(lane);
  for (int tile = warp; tile < 64; tile += 8) {
    const int64_t i = in_tile + tile / 8, o = out_tile + tile % 8;
    if (i >= g.in_tiles || o >= g.out_tiles) continue;
    const uint32_t* const words = g.trellis + (i * g.out_tiles + o) * W::kWords32;
    uint32_t v[3];
    load_stretch<kTileWords>([=](int word) { return words[word]; }, window, v);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int offset = W::offset(j);
      const uint32_t high = offset / 32 < 2 ? v[offset / 32 + 1] : 0;
      const uint32_t state = __funnelshift_r(v[offset / 32], high, offset % 32) & 0xFFFFu;
      // A lane's weights are its part of an MMA fragment: pairs of inputs, of two outputs in turn.
      const int input = lane % 4 * 2 + j % 2 + j / 2 % 2 * 8, output = lane / 4 + j / 4 * 8;
      block[(tile / 8 * 16 + input) * kStride + tile % 8 * 16 + output] =
          value_of(g.codebook, kTileWords / 16, state);
    }
  }
  __syncthreads();
  if (g.suh != nullptr) {
    for (int output = warp; output < kSide; output += 8) {
      float z[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) z[i] = block[(lane * 4 + i) * kStride + output];
      warp_hadamard(z, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) block[(lane * 4 + i) * kStride + output] = z[i] * kHadamardScale;
    }
    __syncthreads();
  }
  for (int input = warp; input < kSide; input += 8) {
    const int64_t row = in_tile * 16 + input;
    if (row >= g.in_tiles * 16) break;
    const float in_scale = g.suh == nullptr ? 1.0f : load_as_float(g.suh, DType::Half, row);
    float z[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i] = block[input * kStride + lane * 4 + i] * in_scale;
    if (g.svh != nullptr) warp_hadamard(z, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t column = out_tile * 16 + lane * 4 + i;
      if (column >= g.out_columns) break;
      if (g.svh != nullptr) z[i] *= kHadamardScale * load_as_float(g.svh, DType::Half, column);
      store_as(g.y, g.y_dtype, row * g.out_columns + column, z[i]);
    }
  }
}

}  // namespace

cudaError_t launch_dequantize(const Gemm& g, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>((g.out_tiles + 7) / 8),
                  static_cast<unsigned>((g.in_tiles + 7) / 8));
  return with_rate(g.tile_words, [&](auto tile_words) {
    const auto kernel = dequantize<tile_words.value>;
    const cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return error;
    kernel<<<grid, 256, kShared, stream>>>(g);
    return cudaGetLastError();
  });
}

}  // namespace trellis::cuda
