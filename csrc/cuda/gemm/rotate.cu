// One block a row, one warp a 128-block of inputs: scale, transform, lay out.
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {
namespace {

constexpr int kFewRows = 264;  // up to here a block's latency matters, beyond it its occupancy
// Largest 16-bit integer whose high byte, rounded so that the low byte is signed, is still a byte.
constexpr float kLargestInteger = 127.0f * 256.0f + 127.0f;

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, step));
  return value;
}

// A row of activations and the scales of its elements.
struct Input {
  Row x, suh;
  bool scaled;

  __device__ Input(const Gemm& g, int64_t row)
      : x(g.x, g.x_dtype, row, g.in_columns),
        suh(g.suh, DType::Half, 0, g.in_tiles * 16),
        scaled(g.suh != nullptr) {}

  // Four neighbours of x * factor * suh (or of x * factor), zero beyond the row's end.
  __device__ __forceinline__ void load(int first, float factor, float (&v)[4]) const {
    x.load(first, v);
#pragma unroll
    for (float& value : v) value *= factor;
    if (!scaled) return;
    float scale[4];
    suh.load(first, scale);
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] *= scale[i];
  }
};

// The largest magnitude of x * suh / 2^16 in blocks first, first + step, ... of a row.
__device__ __forceinline__ float largest_of(const Input& input, int blocks, int first, int step) {
  const int lane = threadIdx.x % 32;
  float most = 0.0f;
#pragma unroll 4
  for (int block = first; block < blocks; block += step) {
    float v[4];
    // x * suh itself may overflow; x * suh / 2^16 cannot.
    input.load(block * 128 + lane * 4, 0x1p-16f, v);
#pragma unroll
    for (const float value : v) most = fmaxf(most, fabsf(value));
  }
  return warp_max(most);
}

// A power of two near the largest magnitude of x * suh in a row: whatever the activations are, what
// is left fits FP16 and float32 holds every sum.
__device__ __forceinline__ float scale_of(float most) {
  if (!(most > 0.0f) || isinf(most)) return 1.0f;
  return ldexpf(1.0f, max(-100, min(126, ilogbf(most) + 16)));
}

// Integers of a block of 128 inputs, with one scale for all of them.
__device__ void write_integers(const Rotated& to, Operand operand, int row, bool real,
                               int64_t block, const float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const int64_t k_tile = static_cast<int64_t>(block) * 8 + lane / 4;
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
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(to.x);
    if (operand == Operand::kBytes) {
      bytes[k_tile * 128 + row * 16 + at] = static_cast<uint8_t>(high);
      bytes[k_tile * 128 + (row + 4) * 16 + at] = static_cast<uint8_t>(low);
    } else {
      bytes[k_tile * 256 + row * 16 + at] = static_cast<uint8_t>(high);
      bytes[k_tile * 256 + 128 + row * 16 + at] = static_cast<uint8_t>(low);
    }
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xFFFFFFFFu, total, step);
  finite = __all_sync(0xFFFFFFFFu, finite);
  if (lane == 0) {
    // Integers cannot carry a NaN or an infinity; the row's scale can.
    const float poison = finite ? 0.0f : __int_as_float(0x7FC00000);
    to.scales[block * 8 + row] = real ? scale + poison : 0.0f;
    to.corrections[block * 8 + row] =
        real ? kMul1Offset * scale * static_cast<float>(total) + poison : 0.0f;
  }
}

// `real`: whether there is such a row.
__device__ void rotate_block(const Input& input, const Rotated& to, Operand operand, int64_t row,
                             bool real, int block, float inverse) {
  const int lane = threadIdx.x % 32;
  float v[4] = {};
  if (real) input.load(block * 128 + lane * 4, inverse, v);
  if (input.scaled) {
    warp_hadamard(v, lane);
#pragma unroll
    for (float& value : v) value *= kHadamardScale;
  }
  if (is_integer(operand)) {
    write_integers(to, operand, static_cast<int>(row), real, block, v);
    return;
  }
  const __half2 first = __floats2half2_rn(v[0], v[1]), second = __floats2half2_rn(v[2], v[3]);
  if (operand == Operand::kSwizzled) {
    // 16-byte piece p of row r of an atom lies at piece p ^ r.
    const int64_t atom = static_cast<int64_t>(block * 2 + lane / 16) * to.row_groups + row / 8;
    const int within = static_cast<int>(row % 8), piece = lane % 16 / 2 ^ within;
    char* const at = reinterpret_cast<char*>(to.x) + atom * 1024 + within * 128 + piece * 16;
    *reinterpret_cast<uint2*>(at + lane % 2 * 8) =
        uint2{reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second)};
    return;
  }
  // Inputs 4l .. 4l+3 of the block are k, k+1 | k+2, k+3 of a tile: two lanes' pairs. Fragments go on
  // to the end of the last block.
  const int64_t k_tile = static_cast<int64_t>(block) * 8 + lane / 4;
  __half2* const tile = reinterpret_cast<__half2*>(to.x) + (k_tile * to.row_groups + row / 8) * 64;
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int k = lane % 4 * 4 + pair * 2;
    const int owner = static_cast<int>(row % 8) * 4 + k % 8 / 2;
    tile[owner * 2 + k / 8] = pair == 0 ? first : second;
  }
}

__global__ void __launch_bounds__(1024)
    rotate_rows(const Gemm g, const Rotated to, const Operand operand) {
  __shared__ float largest[32];
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = static_cast<int>((g.in_tiles + 7) / 8);
  const bool real = row < g.m;
  const Input input(g, row);
  if (real) {
    const float most = largest_of(input, blocks, warp, warps);
    if (lane == 0) largest[warp] = most;
  }
  __syncthreads();
  const float scale = real ? scale_of(warp_max(lane < warps ? largest[lane] : 0.0f)) : 1.0f;
  if (threadIdx.x == 0) to.row_scales[row] = scale;
  for (int64_t i = row * blockDim.x + threadIdx.x; i < to.counters;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to.arrived[i] = 0;
  for (int block = warp; block < blocks; block += warps)
    rotate_block(input, to, operand, row, real, block, 1.0f / scale);
}

}  // namespace

cudaError_t launch_rotate(const Gemm& g, const Rotated& to, Operand operand, int64_t rows,
                          cudaStream_t stream) {
  const int threads = rows <= kFewRows ? 1024 : 256;
  rotate_rows<<<static_cast<unsigned>(rows), threads, 0, stream>>>(g, to, operand);
  return cudaGetLastError();
}

}  // namespace trellis::cuda
