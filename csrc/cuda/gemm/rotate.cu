// One warp a 128-block of inputs: scale, transform, lay out. Few rows are shared by several blocks each,
// since this launch's latency is part of a decode step; each then looks for the row's largest element by
// itself, as waiting for one another would take longer.
#include <algorithm>

#include "launch.cuh"
#include "rotate.cuh"
#include "rotate_row.cuh"

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

// The atom of a row's 64 inputs.
__device__ __forceinline__ char* atom_of(const Rotated& to, int64_t row, int64_t sixty_four) {
  return reinterpret_cast<char*>(to.x) + (sixty_four * to.row_groups + row / 8) * 1024;
}

__device__ __forceinline__ void write_halves(const Rotated& to, bool swizzled, int64_t row,
                                             int block, const float (&v)[4]) {
  const int lane = threadIdx.x % 32;
  const __half2 first = __floats2half2_rn(v[0], v[1]), second = __floats2half2_rn(v[2], v[3]);
  if (swizzled) {
    char* const at = piece_of_atom(atom_of(to, row, block * 2 + lane / 16), row, lane % 16 / 2);
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
  const int exponent = real ? row_exponent_of(warp_max(largest[lane % kRotateWarps]), 16) : 0;
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

// Rows from which on a lane has 32 elements: fewer instructions, and longer latencies, than with 16.
constexpr int64_t kManyRows = 512;

// Swizzled rows that begin at multiples of 16 bytes: a block each.
template <DType kDType, typename Lanes>
__global__ void __launch_bounds__(kRowWarps * 32) rotate_many_rows(const Gemm g, const Rotated to) {
  using Half = std::conditional_t<kDType == DType::Half, __half, __nv_bfloat16>;
  using Element = std::conditional_t<kDType == DType::Float, float, Half>;
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int columns = row < g.m ? static_cast<int>(g.in_columns) : 0;  // zeros beyond the last row
  const Element* const x = static_cast<const Element*>(g.x) + row * g.in_columns;
  const auto load = [=](int column, auto& v) {
#pragma unroll
    for (int unit = 0; unit < Lanes::kUnits; ++unit) {
      const int first = column + Lanes::feature() + unit * Lanes::kApart;
      load_neighbours(x + first, true, first < columns, v[unit]);
    }
  };
  char* const atoms = atom_of(to, row, 0);
  const int64_t step = to.row_groups * int64_t{1024};
  const auto write = [=](int column, auto& v) {
    write_atoms<Lanes>(v, atoms + column / 64 * step, step, row, 1);
  };
  const int exponent = rotate_row<Lanes>(static_cast<const __half*>(g.suh),
                                         static_cast<int>(g.in_tiles / 8), false, load, write);
  if (threadIdx.x == 0) to.row_scales[row] = power_of_two(exponent);
  for (int64_t i = row * blockDim.x + threadIdx.x; i < to.counters;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    to.arrived[i] = 0;
}

// f(std::integral_constant<DType, dtype>{}).
template <typename F>
cudaError_t with_constant(DType dtype, F f) {
  switch (dtype) {
    case DType::Half:
      return f(std::integral_constant<DType, DType::Half>{});
    case DType::BFloat16:
      return f(std::integral_constant<DType, DType::BFloat16>{});
    default:
      return f(std::integral_constant<DType, DType::Float>{});
  }
}

// Whether rotate_many_rows can take these addresses.
bool in_pieces(const Gemm& g) {
  return g.suh != nullptr && g.in_tiles % 8 == 0 && reinterpret_cast<uintptr_t>(g.x) % 16 == 0 &&
         g.in_columns % 8 == 0;
}

cudaError_t launch_many_rows(const Gemm& g, const Rotated& to, int64_t rows, cudaStream_t stream) {
  const auto launch = [&](auto dtype, auto lanes) {
    using Lanes = decltype(lanes);
    const auto kernel = rotate_many_rows<decltype(dtype)::value, Lanes>;
    const cudaError_t error = prefer_shared(kernel);
    if (error != cudaSuccess) return error;
    kernel<<<static_cast<unsigned>(rows), row_threads<Lanes>(g.in_tiles / 8), 0, stream>>>(g, to);
    return cudaGetLastError();
  };
  return with_constant(g.x_dtype, [&](auto dtype) {
    return rows < kManyRows ? launch(dtype, Lanes<8, 2>{}) : launch(dtype, Lanes<8, 4>{});
  });
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
  return with_constant(g.x_dtype, [&](auto dtype) {
    constexpr DType kDType = decltype(dtype)::value;
    return usual ? launch(rotate_rows<kLayout, kDType, true>)
                 : launch(rotate_rows<kLayout, kDType, false>);
  });
}

}  // namespace

cudaError_t launch_rotate(const Gemm& g, const Rotated& to, Operand operand, int64_t rows,
                          cudaStream_t stream) {
  if (is_integer(operand)) return launch_layout<Layout::Integers>(g, to, rows, stream);
  if (operand == Operand::kSwizzled) {
    return in_pieces(g) ? launch_many_rows(g, to, rows, stream)
                        : launch_layout<Layout::Swizzled>(g, to, rows, stream);
  }
  return launch_layout<Layout::Fragments>(g, to, rows, stream);
}

}  // namespace trellis::cuda
