// What the tensor cores leave of a multiprocessor for decoding: the ceiling of the loop in
// csrc/cuda/gemm/wide.cuh, without its copies and barriers. Prints clocks of a k tile of 256 output features
// (two warpgroups) by 256 rows or (four warpgroups) by 128 rows, of which wgmma alone takes 256.
//
//     nvcc -O3 -std=c++17 --expt-relaxed-constexpr -gencode arch=compute_90a,code=sm_90a \
//         -o wgmma_pipes benchmarks/wgmma_pipes.cu && ./wgmma_pipes
#include <algorithm>
#include <cstdio>
#include <vector>

#include "../csrc/cuda/common/hopper.cuh"
#include "../csrc/cuda/decode/decode.cuh"

namespace {

using namespace trellis;
using namespace trellis::cuda;

constexpr int kTileWords = 64;  // 4 bits
constexpr int kSharedBytes = 200 * 1024, kPackedAt = 128 * 1024;
constexpr int kBlocks = 132, kMostWarps = 16;

#ifdef TRELLIS_SM90A
// kRows: of x; kGroup: k tiles that are decoded while as many are multiplied.
template <int kRows, int kCodebook, int kGroup, bool kDecodes, bool kMultiplies>
__device__ void loop(const uint32_t* seed, float* out, long long* clocks, const PowersOfTwo& powers,
                     int groups) {
  extern __shared__ __align__(1024) char shared[];
  for (int i = threadIdx.x; i < kSharedBytes / 4; i += blockDim.x)
    reinterpret_cast<uint32_t*>(shared)[i] = seed[i % 65536];
  const int warp = threadIdx.x / 32, lane = hold(threadIdx.x % 32);
  const Window<kTileWords> window(lane);
  const Hash hash = hash_for<kCodebook>();
  const uint32_t x = hold(shared_address(shared) / 16);
  const uint32_t packed = hold(shared_address(shared) + kPackedAt + warp * kTileWords * 2);
  uint32_t a[2][kGroup][4], sink = 0;
  for (int i = 0; i < 2 * kGroup * 4; ++i) (&a[0][0][0])[i] = seed[threadIdx.x + i];
  float sums[kRows / 2] = {};
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int turn = 0; turn < groups / 2; ++turn) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kGroup && kDecodes; ++i) {
        uint32_t v[3], p[8];
        const uint32_t tile =
            packed + ((half * kGroup + i) % 4 + turn % 4 * 4) * 8 * kTileWords * 2;
        load_stretch<kTileWords>([=](int word) { return load_shared(tile + word * 4); }, window, v);
        products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
        packed_values<kCodebook == kMul1>(p, a[half][i]);
        if (!kMultiplies) sink ^= a[half][i][0] ^ a[half][i][1] ^ a[half][i][2] ^ a[half][i][3];
      }
      if constexpr (kMultiplies) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kGroup; ++i)
          wgmma_f16<kRows>(
              sums, a[half][i],
              wgmma_descriptor(x + turn % 4 * 2048 + (half * kGroup + i) % 4 * 2, 1024));
        wgmma_commit();
        wgmma_wait<1>();
      }
    }
  }
  if constexpr (kMultiplies) wgmma_wait<0>();
  const long long end = clock64();
  float all = __uint_as_float(sink);
  for (const float sum : sums) all += sum;
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (lane == 0) clocks[blockIdx.x * kMostWarps + warp] = end - begin;
}
#endif

template <int kRows, int kCodebook, int kGroup, bool kDecodes, bool kMultiplies>
__global__ void __launch_bounds__(65536 / kRows, 1)
    kernel(const uint32_t* seed, float* out, long long* clocks, const PowersOfTwo powers,
           int groups) {
#ifdef TRELLIS_SM90A
  loop<kRows, kCodebook, kGroup, kDecodes, kMultiplies>(seed, out, clocks, powers, groups);
#endif
}

template <int kRows, int kCodebook, int kGroup, bool kDecodes = true, bool kMultiplies = true>
void print(const char* name) {
  constexpr int kKTiles = 8000;
  std::vector<uint32_t> values(65536 + 4096);
  for (size_t i = 0; i < values.size(); ++i)  // FP16 numbers of magnitude 0.1 to 2
    values[i] = (static_cast<uint32_t>(i) * 2654435761u & 0x8FFF8FFFu) | 0x30003000u;
  uint32_t* seed;
  float* out;
  long long* clocks;
  cudaMalloc(&seed, values.size() * 4);
  cudaMalloc(&out, kBlocks * kMostWarps * 32 * 4);
  cudaMalloc(&clocks, kBlocks * kMostWarps * 8);
  cudaMemcpy(seed, values.data(), values.size() * 4, cudaMemcpyHostToDevice);
  cudaMemset(clocks, 0, kBlocks * kMostWarps * 8);
  const auto launched = kernel<kRows, kCodebook, kGroup, kDecodes, kMultiplies>;
  cudaFuncSetAttribute(launched, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  for (int i = 0; i < 2; ++i)
    launched<<<kBlocks, 65536 / kRows, kSharedBytes>>>(seed, out, clocks, powers_of_two(),
                                                       kKTiles / kGroup);
  std::vector<long long> spans(kBlocks * kMostWarps);
  cudaMemcpy(spans.data(), clocks, spans.size() * 8, cudaMemcpyDeviceToHost);
  const double longest = static_cast<double>(*std::max_element(spans.begin(), spans.end()));
  std::printf("%-60s %6.1f\n", name, longest / kKTiles);
  cudaFree(seed), cudaFree(out), cudaFree(clocks);
}

}  // namespace

int main() {
  std::printf("%-60s %6s\n", "clocks of a k tile", "");
  print<256, kMcg, 2, false>("256 rows, nothing decoded");
  print<256, kMcg, 2, true, false>("mcg decoded by two warpgroups, nothing multiplied");
  print<256, kMcg, 1>("256 rows, mcg, one k tile at a time");
  print<256, kMcg, 2>("256 rows, mcg, two");
  print<256, kMcg, 4>("256 rows, mcg, four");
  print<256, kMul1, 2>("256 rows, mul1, two");
  print<128, kMcg, 2, false>("128 rows, nothing decoded");
  print<128, kMcg, 2, true, false>("mcg decoded by four warpgroups, nothing multiplied");
  print<128, kMcg, 1>("128 rows, mcg, one k tile at a time");
  print<128, kMcg, 2>("128 rows, mcg, two");
  print<128, kMul1, 2>("128 rows, mul1, two");
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::fprintf(stderr, "wgmma_pipes: %s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
