// One warp a 128-block of inputs: scale, transform, lay out. Few rows are shared by several blocks each,
// since this launch's latency is part of a decode step; each then looks for the row's largest element by
// itself, as waiting for one another would take longer.
#include <algorithm>

#include "launch.cuh"
#include "rotate.cuh"
#include "rows.cuh"

namespace trellis::cuda {
namespace {

constexpr int kRotateWarps = 8;
constexpr int kRotateBlocks = 264;  // that few rows are spread over: two a multiprocessor
// Largest 16-bit integer whose high byte, rounded so that the low byte is signed, is still a byte.
constexpr float kLargestInteger = 127.0f * 256.0f + 127.0f;

// A row of activations and the scales of its elements. Instantiations rather than branches, and rolled
// loops, since every launch of a decode step fetches its instructions anew: the weights of a layer push
// them out of the cache. kUsual: there is suh, and four elements of either are one load.
template <DType kDType, bool kUsual>
struct Input {
  static constexpr int kBytes = kDType == DType::Float ? 4 : 2;
  const char* x;
  const __half* suh;
  int size;

  __device__ Input(const Gemm& g, int64_t row)
      : x(static_cast<const char*>(g.x) + row * g.in_columns * kBytes),
        suh(static_cast<const __half*>(g.suh)),
        size(static_cast<int>(g.in_columns)) {}

  __device__ bool scaled() const { return kUsual || suh != nullptr; }

  // Four neighbours of x * factor * suh (or of x * factor), zero beyond the row's end.
  __device__ __forceinline__ void load(int first, float factor, float (&v)[4]) const {
    float scale[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    if constexpr (kUsual) {
      v[0] = v[1] = v[2] = v[3] = 0.0f;
      if (first < size) {
        load_four<kDType>(x + static_cast<int64_t>(first) * kBytes, v);
        load_four<DType::Half>(reinterpret_cast<const char*>(suh + first), scale);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        v[i] = first + i < size ? load_as_float(x, kDType, first + i) : 0.0f;
        if (scaled() && first + i < size) scale[i] = __half2float(suh[first + i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = v[i] * factor * scale[i];
  }
};

// The largest magnitude of x * suh / 2^16 in blocks first, first + step, ... of a row.
template <typename Input>
__device__ __forceinline__ float largest_of(const Input& input, int blocks, int first, int step) {
  const int lane = threadIdx.x % 32;
  float most = 0.0f;
#pragma unroll 1
  for (int block = first; block < blocks; block += 4 * step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // at a time, to wait once; zeros beyond the end
      float v[4];
      // x * suh itself may overflow; x * suh / 2^16 cannot.
      input.load((block + i * step) * 128 + lane * 4, 0x1p-16f, v);
#pragma unroll
      for (const float value : v) most = fmaxf(most, fabsf(value));
    }
  }
  return warp_max(most);
}

// The exponent of a power of two near the largest magnitude of x * suh in a row, given that over 2^16:
// whatever the activations are, what is left fits FP16 and float32 holds every sum.
__device__ __forceinline__ int row_exponent_of(float most) {
  if (!(most > 0.0f) || isinf(most)) return 0;
  const int exponent = (__float_as_int(most) >> 23) - 127;  // -127 for a denormal number
  return max(-100, min(126, exponent + 16));
}

// How a row's block of 128 inputs is laid out, four neighbours a lane.
enum class Layout { Fragments, Integers, Swizzled };

// Integers, with one scale for all of a block.
__device__ __forceinline__ void write_integers(const Rotated& to, int row, bool real, int64_t block,
                                               const float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const float largest =
      warp_max(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))));
  // A block that is so small beside the row's largest (about 1 here) counts as zeros.
  const float scale =
      largest > 0x1p-100f && !isinf(largest) ? largest * (1.0f / kLargestInteger) : 1.0f;
  const float inverse = __fdividef(1.0f, scale);
  // Bytes of four rows, then their low bytes.
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(to.x) + (block * 8 + lane / 4) * 128 +
                         row * 16 + lane % 2 * 8 + lane % 4 / 2 * 2;
  int total = 0;
  bool finite = true;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    finite &= isfinite(v[i]);
    const int value = isfinite(v[i]) ? __float2int_rn(v[i] * inverse) : 0;
    total += value;
    const int high = (value + 128) >> 8, low = value - high * 256;
    const int at = i / 2 * 4 + i % 2;
    bytes[at] = static_cast<uint8_t>(high);
    bytes[at + 64] = static_cast<uint8_t>(low);
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

// Where eight neighbours of a row's 64 inputs lie: 16-byte piece p of row r of an atom is at piece p ^ r.
__device__ __forceinline__ char* swizzled_piece(const Rotated& to, int64_t row, int64_t sixty_four,
                                                int piece) {
  const int within = static_cast<int>(row % 8);
  return reinterpret_cast<char*>(to.x) + (sixty_four * to.row_groups + row / 8) * 1024 +
         within * 128 + (piece ^ within) * 16;
}

__device__ __forceinline__ void write_halves(const Rotated& to, bool swizzled, int64_t row,
                                             int block, const float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const __half2 first = __floats2half2_rn(v[0], v[1]), second = __floats2half2_rn(v[2], v[3]);
  if (swizzled) {
    char* const at = swizzled_piece(to, row, block * 2 + lane / 16, lane % 16 / 2);
    *reinterpret_cast<uint2*>(at + lane % 2 * 8) =
        uint2{reinterpret_cast<const uint32_t&>(first), reinterpret_cast<const uint32_t&>(second)};
    return;
  }
  // Inputs 4l .. 4l+3 of the block are k, k+1 | k+2, k+3 of a tile: two lanes' pairs. Fragments go on
  // to the end of the last block.
  const int64_t k_tile = static_cast<int64_t>(block) * 8 + lane / 4;
  __half2* const tile = reinterpret_cast<__half2*>(to.x) + (k_tile * to.row_groups + row / 8) * 64;
  __half2* const at = tile + (row % 8 * 4 + lane % 2 * 2) * 2 + lane % 4 / 2;
  at[0] = first;
  at[2] = second;
}

// `shares`: blocks of a row.
template <Layout kLayout, DType kDType, bool kUsual>
__global__ void __launch_bounds__(kRotateWarps * 32)
    rotate_rows(const Gemm g, const Rotated to, const int shares) {
  __shared__ float largest[kRotateWarps];
  let_next_kernel_start();
  const unsigned row_of_grid = blockIdx.x / static_cast<unsigned>(shares);
  const int64_t row = row_of_grid;
  const int share = static_cast<int>(blockIdx.x - row_of_grid * shares);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int blocks = static_cast<int>((g.in_tiles + 7) / 8);
  const bool real = row < g.m;
  const Input<kDType, kUsual> input(g, row);
  if (real) {
    const float most = largest_of(input, blocks, warp, kRotateWarps);
    if (lane == 0) largest[warp] = most;
  }
  __syncthreads();
  const int exponent = real ? row_exponent_of(warp_max(largest[lane % kRotateWarps])) : 0;
  if (share == 0 && threadIdx.x == 0) to.row_scales[row] = power_of_two(exponent);
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < to.counters;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to.arrived[i] = 0;
  // Blocks at a time: where rows are many, so that their latencies overlap; else the fewer instructions the
  // better.
  constexpr int kTogether = kLayout == Layout::Swizzled ? 4 : 1;
  const int step = shares * kRotateWarps;
#pragma unroll 1
  for (int first = share * kRotateWarps + warp; first < blocks; first += kTogether * step) {
    float v[kTogether][4] = {};
#pragma unroll
    for (int i = 0; i < kTogether; ++i)
      if (real) input.load((first + i * step) * 128 + lane * 4, power_of_two(-exponent), v[i]);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if (input.scaled()) {
        warp_hadamard(v[i], lane);
#pragma unroll
        for (float& value : v[i]) value *= kHadamardScale;
      }
    }
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const int block = first + i * step;
      if (block >= blocks) break;
      if constexpr (kLayout == Layout::Integers)
        write_integers(to, static_cast<int>(row), real, block, v[i]);
      else
        write_halves(to, kLayout == Layout::Swizzled, row, block, v[i]);
    }
  }
}

// ---- many rows, swizzled -----------------------------------------------------------------------------
// A block a row, a lane 16 neighbours, eight lanes a 128-block: seven eighths of the transform's steps are in a
// lane or between three pairs of lanes, and what a thread has loaded stays until the row's scale is known.
constexpr int kLaneInputs = 16, kWarpBlocks = 4;

template <DType kDType>
struct Sixteen {
  static constexpr int kPieces = kDType == DType::Float ? 4 : 2;
  uint4 raw[kPieces];

  __device__ __forceinline__ void load(const char* x, int column, int columns) {
    const uint4* const from = reinterpret_cast<const uint4*>(x) + column / kLaneInputs * kPieces;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) raw[i] = column < columns ? from[i] : uint4{};
  }
  // Times factor and suh.
  __device__ __forceinline__ void scaled(float factor, const __half* suh,
                                         float (&v)[kLaneInputs]) const {
    const char* const bytes = reinterpret_cast<const char*>(raw);
    constexpr int kFour = sizeof(raw) / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float four[4], scale[4];
      load_four<kDType>(bytes + i * kFour, four);
      load_four<DType::Half>(reinterpret_cast<const char*>(suh + i * 4), scale);
#pragma unroll
      for (int j = 0; j < 4; ++j) v[i * 4 + j] = four[j] * factor * scale[j];
    }
  }
};

// kTurns: 128-blocks of a lane that are loaded at a time; all of the row's where it has so few.
template <DType kDType, int kTurns>
__global__ void __launch_bounds__(kRotateWarps * 32)
    rotate_many_rows(const Gemm g, const Rotated to) {
  __shared__ float largest[kRotateWarps];
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = static_cast<int>(blockDim.x) / 32;
  const int blocks = static_cast<int>((g.in_tiles + 7) / 8);
  const int columns = row < g.m ? static_cast<int>(g.in_columns) : 0;  // zeros beyond the last row
  const char* const x =
      static_cast<const char*>(g.x) + row * g.in_columns * (kDType == DType::Float ? 4 : 2);
  const __half* const suh = static_cast<const __half*>(g.suh);
  const int step = warps * kWarpBlocks;  // blocks of a turn
  const auto block_of = [&](int chunk, int turn) {
    return (chunk * kTurns + turn) * step + warp * kWarpBlocks + lane / 8;
  };
  const int chunks = (blocks + kTurns * step - 1) / (kTurns * step);

  Sixteen<kDType> held[kTurns];
  const auto load = [&](int chunk) {
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn)
      held[turn].load(x, block_of(chunk, turn) * 128 + lane % 8 * kLaneInputs, columns);
  };
  // Of suh those that lie in it; what they would scale beyond is zero.
  const auto scaled = [&](int chunk, int turn, float factor, float (&v)[kLaneInputs]) {
    const int column = block_of(chunk, turn) * 128 + lane % 8 * kLaneInputs;
    held[turn].scaled(factor, suh + (column < columns ? column : 0), v);
  };
  float most = 0.0f;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    load(chunk);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float v[kLaneInputs];
      scaled(chunk, turn, 0x1p-16f, v);  // as in largest_of
#pragma unroll
      for (const float value : v) most = fmaxf(most, fabsf(value));
    }
  }
  most = warp_max(most);
  if (lane == 0) largest[warp] = most;
  __syncthreads();
  most = warp_max(lane < warps ? largest[lane] : 0.0f);
  const int exponent = row_exponent_of(most);
  if (threadIdx.x == 0) to.row_scales[row] = power_of_two(exponent);
#pragma unroll 1
  for (int64_t i = row * blockDim.x + threadIdx.x; i < to.counters;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to.arrived[i] = 0;
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (chunks > 1) load(chunk);
#pragma unroll
    for (int turn = 0; turn < kTurns; ++turn) {
      float v[kLaneInputs];
      scaled(chunk, turn, power_of_two(-exponent), v);
      thread_hadamard(v);
#pragma unroll
      for (int stride = 1; stride < 8; stride *= 2) {
        const float sign = lane & stride ? -1.0f : 1.0f;
#pragma unroll
        for (float& value : v)
          value = fmaf(sign, value, __shfl_xor_sync(0xFFFFFFFFu, value, stride));
      }
      const int block = block_of(chunk, turn);
      if (block >= blocks) continue;
      uint32_t pairs[kLaneInputs / 2];
#pragma unroll
      for (int i = 0; i < kLaneInputs / 2; ++i) {
        const __half2 two =
            __floats2half2_rn(v[2 * i] * kHadamardScale, v[2 * i + 1] * kHadamardScale);
        pairs[i] = reinterpret_cast<const uint32_t&>(two);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i)
        *reinterpret_cast<uint4*>(
            swizzled_piece(to, row, block * 2 + lane % 8 / 4, lane % 4 * 2 + i)) =
            uint4{pairs[4 * i], pairs[4 * i + 1], pairs[4 * i + 2], pairs[4 * i + 3]};
    }
  }
}

// Whether rotate_many_rows can take these addresses.
bool in_sixteens(const Gemm& g) {
  return g.suh != nullptr && reinterpret_cast<uintptr_t>(g.x) % 16 == 0 &&
         reinterpret_cast<uintptr_t>(g.suh) % 8 == 0 && g.in_columns % kLaneInputs == 0;
}

template <DType kDType>
cudaError_t launch_many_rows(const Gemm& g, const Rotated& to, int64_t rows, cudaStream_t stream) {
  const int64_t groups = (g.in_tiles + 8 * kWarpBlocks - 1) / (8 * kWarpBlocks);
  const auto launch = [&](auto kernel, int turns) {
    const int64_t warps = std::min<int64_t>(kRotateWarps, (groups + turns - 1) / turns);
    const cudaError_t error = prefer_shared(kernel);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(rows), static_cast<unsigned>(warps) * 32, 0, stream>>>(g, to);
    return cudaGetLastError();
  };
  if (groups <= kRotateWarps) return launch(rotate_many_rows<kDType, 1>, 1);
  if (groups <= 2 * kRotateWarps) return launch(rotate_many_rows<kDType, 2>, 2);
  return launch(rotate_many_rows<kDType, 4>, 4);
}

template <Layout kLayout>
cudaError_t launch_layout(const Gemm& g, const Rotated& to, int64_t rows, cudaStream_t stream) {
  const int64_t most = (g.in_tiles + 8 * kRotateWarps - 1) / (8 * kRotateWarps);
  const int shares =
      static_cast<int>(std::max<int64_t>(1, std::min<int64_t>(most, kRotateBlocks / rows)));
  const auto launch = [&](auto kernel) {
    const cudaError_t error = prefer_shared(kernel);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(rows * shares), kRotateWarps * 32, 0, stream>>>(g, to, shares);
    return cudaGetLastError();
  };
  const int element = g.x_dtype == DType::Float ? 4 : 2;
  const bool usual = g.suh != nullptr && reinterpret_cast<uintptr_t>(g.x) % (4 * element) == 0 &&
                     reinterpret_cast<uintptr_t>(g.suh) % 8 == 0 && g.in_columns % 4 == 0;
  switch (g.x_dtype) {
    case DType::Half:
      return usual ? launch(rotate_rows<kLayout, DType::Half, true>)
                   : launch(rotate_rows<kLayout, DType::Half, false>);
    case DType::BFloat16:
      return usual ? launch(rotate_rows<kLayout, DType::BFloat16, true>)
                   : launch(rotate_rows<kLayout, DType::BFloat16, false>);
    default:
      return usual ? launch(rotate_rows<kLayout, DType::Float, true>)
                   : launch(rotate_rows<kLayout, DType::Float, false>);
  }
}

}  // namespace

cudaError_t launch_rotate(const Gemm& g, const Rotated& to, Operand operand, int64_t rows,
                          cudaStream_t stream) {
  if (is_integer(operand)) return launch_layout<Layout::Integers>(g, to, rows, stream);
  if (operand == Operand::kSwizzled) {
    if (!in_sixteens(g)) return launch_layout<Layout::Swizzled>(g, to, rows, stream);
    switch (g.x_dtype) {
      case DType::Half:
        return launch_many_rows<DType::Half>(g, to, rows, stream);
      case DType::BFloat16:
        return launch_many_rows<DType::BFloat16>(g, to, rows, stream);
      default:
        return launch_many_rows<DType::Float>(g, to, rows, stream);
    }
  }
  return launch_layout<Layout::Fragments>(g, to, rows, stream);
}

}  // namespace trellis::cuda
