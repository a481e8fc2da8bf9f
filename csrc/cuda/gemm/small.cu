// The small route's first launch, and the choice of the second one's shape.
#include <algorithm>

#include "small.cuh"

namespace trellis::cuda {
namespace {

constexpr int kRotateWarps = 32;  // one block a row: its latency is what matters
// Largest 16-bit integer whose high byte, rounded so that the low byte is signed, is still a byte.
constexpr float kLargestInteger = 127.0f * 256.0f + 127.0f;

// Four neighbours of a row of x * suh (or of x), zero beyond the row's end.
__device__ __forceinline__ void load_four(const Gemm& g, int64_t row, int64_t feature,
                                          float (&v)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    v[i] = 0.0f;
    if (feature + i < g.in_columns)
      v[i] = load_as_float(g.x, g.x_dtype, row * g.in_columns + feature + i);
  }
}

__device__ __forceinline__ void multiply_suh(const Gemm& g, int64_t feature, float (&v)[4]) {
  if (g.suh == nullptr) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] *= load_as_float(g.suh, DType::Half, feature + i);
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// A power of two near the largest magnitude of x * suh in a row: whatever the activations are, what
// is left fits FP16 and float32 holds every sum.
__device__ float row_scale(const Gemm& g, int64_t row, int64_t blocks) {
  __shared__ float largest[kRotateWarps];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float most = 0.0f;
#pragma unroll 4
  for (int64_t block = warp; block < blocks; block += kRotateWarps) {
    float v[4];
    load_four(g, row, block * 128 + lane * 4, v);
    // x * suh itself may overflow; x * suh / 2^16 cannot.
#pragma unroll
    for (float& value : v) value *= 0x1p-16f;
    multiply_suh(g, block * 128 + lane * 4, v);
#pragma unroll
    for (const float value : v) most = fmaxf(most, fabsf(value));
  }
  most = warp_max(most);
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  most = warp_max(largest[lane]);
  if (!(most > 0.0f) || isinf(most)) return 1.0f;
  return ldexpf(1.0f, max(-100, min(126, ilogbf(most) + 16)));
}

__device__ void rotate_block(const Gemm& g, const SmallScratch& scratch, Operand operand, int row,
                             int64_t block, float inverse);

// One block a row, one warp a 128-block of inputs: scale, transform, and lay out as MMA fragments.
__global__ void __launch_bounds__(kRotateWarps * 32)
    rotate_small(const Gemm g, const SmallScratch scratch, const Operand operand) {
  let_next_kernel_start();
  const int row = blockIdx.x;
  const int64_t blocks = (g.in_tiles + 7) / 8;
  const float scale = row < g.m ? row_scale(g, row, blocks) : 1.0f;
  if (threadIdx.x == 0) scratch.row_scales[row] = scale;
  const int64_t column_blocks = (g.out_tiles + kSmallTiles - 1) / kSmallTiles;
  for (int64_t i = threadIdx.x; row == 0 && i < column_blocks; i += kRotateWarps * 32)
    scratch.arrived[i] = 0;
  for (int64_t block = threadIdx.x / 32; block < blocks; block += kRotateWarps)
    rotate_block(g, scratch, operand, row, block, 1.0f / scale);
}

__device__ void rotate_block(const Gemm& g, const SmallScratch& scratch, Operand operand, int row,
                             int64_t block, float inverse) {
  const int lane = threadIdx.x % 32;
  const bool real = row < g.m;
  float v[4] = {};
  if (real) {
    load_four(g, row, block * 128 + lane * 4, v);
#pragma unroll
    for (float& value : v) value *= inverse;
    multiply_suh(g, block * 128 + lane * 4, v);
  }
  if (g.suh != nullptr) {
    warp_hadamard(v, lane);
#pragma unroll
    for (float& value : v) value *= 0.088388347648318447f;
  }
  const int64_t k_tile = block * 8 + lane / 4;  // fragments go on to the end of the last block
  if (!is_integer(operand)) {
    // Inputs 4l .. 4l+3 of the block are k, k+1 | k+2, k+3 of the tile: two lanes' pairs.
    const int row_groups = gridDim.x / kSmallRows;
    __half2* const to = reinterpret_cast<__half2*>(scratch.fragments) +
                        (k_tile * row_groups + row / kSmallRows) * 64;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int k = lane % 4 * 4 + pair * 2;
      const int owner = row % kSmallRows * 4 + k % 8 / 2;
      to[owner * 2 + k / 8] = __floats2half2_rn(v[pair * 2], v[pair * 2 + 1]);
    }
    return;
  }

  const float largest =
      warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  const float scale = largest > 0.0f && !isinf(largest) ? largest / kLargestInteger : 1.0f;
  int total = 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    finite &= isfinite(v[i]);
    const float steps = v[i] / scale;
    const int value = isfinite(steps) ? __float2int_rn(steps) : 0;
    total += value;
    const int high = (value + 128) >> 8, low = value - high * 256;
    const int k = lane % 4 * 4 + i;
    const int at = k % 8 / 2 * 4 + k % 2 + k / 8 * 2;  // byte of the row's four lanes
    uint8_t* const to = reinterpret_cast<uint8_t*>(scratch.fragments);
    if (operand == Operand::kBytes) {
      to[k_tile * 128 + row * 16 + at] = static_cast<uint8_t>(high);
      to[k_tile * 128 + (row + 4) * 16 + at] = static_cast<uint8_t>(low);
    } else {
      to[k_tile * 256 + row * 16 + at] = static_cast<uint8_t>(high);
      to[k_tile * 256 + 128 + row * 16 + at] = static_cast<uint8_t>(low);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
  finite = __all_sync(0xFFFFFFFFu, finite);
  if (lane == 0) {
    // Integers cannot carry a NaN or an infinity; the row's scale can.
    const float poison = finite ? 0.0f : __int_as_float(0x7FC00000);
    scratch.scales[block * kSmallRows + row] = real ? scale + poison : 0.0f;
    scratch.corrections[block * kSmallRows + row] =
        real ? kMul1Offset * scale * static_cast<float>(total) + poison : 0.0f;
  }
}

// As launch_small_rate chooses it.
Operand operand_of(const Gemm& g) {
  const bool mul1 = g.codebook == 2;
  if (g.m > kSmallRows) return mul1 ? Operand::kPackedMul1 : Operand::kPackedHalves;
  if (!mul1) return Operand::kHalves;
  return g.m <= 4 ? Operand::kBytes : Operand::kBytesTwoPasses;
}

int64_t fragment_bytes(const Gemm& g) {
  const Operand operand = operand_of(g);
  const int words = operand == Operand::kBytes            ? 1
                    : operand == Operand::kBytesTwoPasses ? 2
                                                          : 2 * small_row_groups(g);
  return (g.in_tiles + 7) / 8 * 8 * 128 * words;
}

int64_t column_blocks_of(const Gemm& g) { return (g.out_tiles + kSmallTiles - 1) / kSmallTiles; }
int64_t groups_of(const Gemm& g) {
  return (g.in_tiles + kSmallGroup - 1) / kSmallGroup * column_blocks_of(g);
}

}  // namespace

int64_t small_share(const Gemm& g, int sm_count) {
  const Operand operand = operand_of(g);
  const int row_groups = small_row_groups(g);
  // What registers allow (SmallShape::kResident) and what shared memory does (SmallLayout::kBytes
  // and 1 KiB of the system's, of 228 KiB).
  const int by_registers = row_groups == 4               ? 2
                           : row_groups == 2             ? 3
                           : operand == Operand::kHalves ? 4
                           : operand == Operand::kBytes  ? 3
                                                         : 2;
  const int bytes =
      small_stages(g.tile_words) * kSmallWarps * kSmallGroup * kWarpTiles * g.tile_words * 2 +
      kSmallSums * 4 + 8 + 1024;
  const int resident = std::min(by_registers, 228 * 1024 / bytes);
  // Whole groups for each warp of as many blocks as the GPU holds at once.
  const int64_t warps = static_cast<int64_t>(sm_count) * resident * kDepthWarps;
  return (groups_of(g) + warps - 1) / warps * kDepthWarps;
}

int64_t small_scratch_bytes(const Gemm& g, int64_t share) {
  const int64_t blocks = (g.in_tiles + 7) / 8;
  const int64_t stretches = (groups_of(g) + share - 1) / share;
  const int row_groups = small_row_groups(g);
  return fragment_bytes(g) + blocks * kSmallRows * 4 * 2 + row_groups * kSmallRows * 4 +
         stretches * 2 * row_groups * kSmallSums * 4 + column_blocks_of(g) * 4;
}

cudaError_t launch_small(const Gemm& g, void* memory, int64_t share, cudaStream_t stream) {
  const Operand operand = operand_of(g);
  const int64_t blocks = (g.in_tiles + 7) / 8;
  const int64_t stretches = (groups_of(g) + share - 1) / share;
  SmallScratch scratch;
  scratch.fragments = static_cast<uint32_t*>(memory);
  scratch.scales = reinterpret_cast<float*>(static_cast<char*>(memory) + fragment_bytes(g));
  scratch.corrections = scratch.scales + blocks * kSmallRows;
  scratch.row_scales = scratch.corrections + blocks * kSmallRows;
  const int row_groups = small_row_groups(g);
  scratch.parts = scratch.row_scales + row_groups * kSmallRows;
  scratch.arrived =
      reinterpret_cast<unsigned*>(scratch.parts + stretches * 2 * row_groups * kSmallSums);
  const int rows = operand == Operand::kBytes ? 4 : row_groups * kSmallRows;
  rotate_small<<<rows, kRotateWarps * 32, 0, stream>>>(g, scratch, operand);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  switch (g.tile_words) {
    case 16:
      return launch_small_rate<16>(g, scratch, static_cast<int>(share), stream);
    case 24:
      return launch_small_rate<24>(g, scratch, static_cast<int>(share), stream);
    case 32:
      return launch_small_rate<32>(g, scratch, static_cast<int>(share), stream);
    case 40:
      return launch_small_rate<40>(g, scratch, static_cast<int>(share), stream);
    case 48:
      return launch_small_rate<48>(g, scratch, static_cast<int>(share), stream);
    case 56:
      return launch_small_rate<56>(g, scratch, static_cast<int>(share), stream);
    case 64:
      return launch_small_rate<64>(g, scratch, static_cast<int>(share), stream);
    case 80:
      return launch_small_rate<80>(g, scratch, static_cast<int>(share), stream);
    case 96:
      return launch_small_rate<96>(g, scratch, static_cast<int>(share), stream);
    case 112:
      return launch_small_rate<112>(g, scratch, static_cast<int>(share), stream);
    default:
      return launch_small_rate<128>(g, scratch, static_cast<int>(share), stream);
  }
}

}  // namespace trellis::cuda
