// What a multiprocessor's pipes take for the instructions of decoding, alone and side by side: the ceiling of
// the loops in csrc/cuda/gemm/small.cuh. Prints clocks of a scheduler for one warp instruction, or for one
// tile of 256 weights, with 2, 4 and 8 warps a scheduler.
//
//     nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a -o pipes benchmarks/pipes.cu && ./pipes
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr int kTurns = 300, kUnrolled = 8;  // turns of the measured loop, and what it holds
constexpr uint32_t kMultiplier = 0xCBAC1FEDu;

__device__ void mma_f16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ void mma_u8s8(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  int (&sums)[4] = reinterpret_cast<int (&)[4]>(c);
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(sums[0]), "+r"(sums[1]), "+r"(sums[2]), "+r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ uint32_t multiply_add(uint32_t x, uint32_t y, uint32_t z) {
  uint32_t result;
  asm volatile("mad.lo.u32 %0, %1, %2, %3;" : "=r"(result) : "r"(x), "r"(y), "r"(z));
  return result;
}
__device__ uint32_t logic(uint32_t x, uint32_t y) {
  uint32_t result;
  asm volatile("lop3.b32 %0, %1, 0x8fff8fff, %2, 0x6a;" : "=r"(result) : "r"(x), "r"(y));
  return result;
}

// ---- one kind of instruction, or several of them in turns ------------------------------------------------
enum Single {
  kMultiply,
  kLogic,
  kShift,
  kMultiplyAndLogic,
  kHalf2,
  kMma,
  kIntegerMma,
  kMmaAndLogic,
  kMmaAndMultiply
};

template <int kWhat>
__device__ void run_single(uint32_t (&r)[16], float (&sums)[4][4], uint32_t c, uint32_t d) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (kWhat == kMultiply || kWhat == kMultiplyAndLogic) r[i] = multiply_add(r[i], c, d);
    if (kWhat == kLogic || kWhat == kMultiplyAndLogic) r[8 + i] = logic(r[8 + i], c);
    if (kWhat == kShift) asm volatile("shf.r.wrap.b32 %0, %0, %1, 4;" : "+r"(r[i]) : "r"(c));
    if (kWhat == kHalf2) asm volatile("fma.rn.f16x2 %0, %0, %1, %2;" : "+r"(r[i]) : "r"(c), "r"(d));
    const uint32_t a[4] = {r[0], r[1], r[2], r[3]};
    if (kWhat == kMma || kWhat == kMmaAndLogic || kWhat == kMmaAndMultiply)
      mma_f16(sums[i % 4], a, c, d);
    if (kWhat == kIntegerMma) mma_u8s8(sums[i % 4], a, c, d);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t& mine = r[8 + (i * 4 + j) % 8];
      if (kWhat == kMmaAndLogic) mine = logic(mine, c);
      if (kWhat == kMmaAndMultiply) mine = multiply_add(mine, c, d);
    }
  }
}

// ---- a tile at 4 bits, its packed words in registers -----------------------------------------------------
// kMul1: bytes to an integer MMA, no mask; kHeld: the multiplier in a register.
template <bool kMul1, bool kHeld, bool kMultiplies>
__device__ void run_tile(uint32_t low, uint32_t high, uint32_t multiplier, uint32_t mask,
                         uint32_t (&sinks)[8], float (&sums)[4]) {
  uint32_t p[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint32_t window = j == 0 ? low : __funnelshift_r(low, high, 4 * j);
    const uint32_t by = kHeld ? multiplier : kMultiplier, upper = (window >> 16) * by;
    p[3 - j] = upper;
    p[7 - j] = upper * 0xFFFF0000u + window * by;
  }
  if constexpr (!kMultiplies) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if constexpr (kMul1)
        sinks[j] ^= p[j];
      else
        sinks[j] = logic(p[j], sinks[j]);
    }
    return;
  }
  if constexpr (!kMul1) {
#pragma unroll
    for (uint32_t& product : p) product = logic(product, mask);
  }
  const uint32_t first[4] = {p[0], p[4], p[1], p[5]}, second[4] = {p[2], p[6], p[3], p[7]};
  if constexpr (kMul1)
    mma_u8s8(sums, first, multiplier, mask), mma_u8s8(sums, second, mask, multiplier);
  else
    mma_f16(sums, first, multiplier, mask), mma_f16(sums, second, mask, multiplier);
}

template <typename Body>
__device__ void measure(uint32_t* out, long long* clocks, const uint32_t (&seed)[16], Body body) {
  uint32_t r[16], sinks[8] = {};
  float sums[4][4] = {};
  for (int i = 0; i < 16; ++i) r[i] = seed[i];
  const long long begin = clock64();
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kUnrolled; ++i) body(r, sinks, sums, i);
  }
  const long long end = clock64();
  uint32_t all = 0;
  for (int i = 0; i < 16; ++i) all ^= r[i] ^ __float_as_uint(sums[i / 4][i % 4]) ^ sinks[i % 8];
  out[blockIdx.x * blockDim.x + threadIdx.x] = all;
  if (threadIdx.x % 32 == 0) clocks[blockIdx.x * 8 + threadIdx.x / 32] = end - begin;
}

__device__ void seed_of(const uint32_t* from, uint32_t (&seed)[16]) {
  for (int i = 0; i < 16; ++i) seed[i] = from[threadIdx.x + i];
}

template <int kWhat>
__global__ void __launch_bounds__(256)
    singles(uint32_t* out, long long* clocks, uint32_t c, uint32_t d) {
  uint32_t seed[16];
  seed_of(out, seed);
  measure(out, clocks, seed,
          [&](auto& r, auto&, auto& sums, int) { run_single<kWhat>(r, sums, c, d); });
}

template <bool kMul1, bool kHeld, bool kMultiplies>
__global__ void __launch_bounds__(256)
    tiles(uint32_t* out, long long* clocks, uint32_t multiplier, uint32_t mask) {
  uint32_t seed[16];
  seed_of(out, seed);
  // In a register rather than in the bank of constants.
  asm volatile("mov.b32 %0, %0;" : "+r"(multiplier));
  measure(out, clocks, seed, [&](auto& r, auto& sinks, auto& sums, int i) {
    r[0] += r[1];
    run_tile<kMul1, kHeld, kMultiplies>(r[0], r[1], multiplier, mask, sinks, sums[i % 4]);
    r[1] ^= r[0];
  });
}

// Clocks of a scheduler for each of `count` pieces of work that a warp does in a turn.
template <typename Kernel>
void print(const char* name, Kernel kernel, uint32_t c, uint32_t d, int count) {
  int sms = 0;
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0);
  uint32_t* out;
  long long* clocks;
  cudaMalloc(&out, 1 << 22);
  cudaMalloc(&clocks, 1 << 20);
  cudaMemset(out, 0x5b, 1 << 22);
  std::printf("%-52s", name);
  for (const int blocks : {1, 2, 4}) {  // of a multiprocessor; two warps a scheduler each
    std::vector<long long> spans(static_cast<size_t>(sms) * blocks * 8);
    for (int i = 0; i < 2; ++i) kernel<<<sms * blocks, 256>>>(out, clocks, c, d);
    cudaMemcpy(spans.data(), clocks, spans.size() * sizeof(long long), cudaMemcpyDeviceToHost);
    // All blocks run at the same time, so the longest span is that of all.
    const double longest = static_cast<double>(*std::max_element(spans.begin(), spans.end()));
    std::printf(" %7.2f", longest / kTurns / count / (2 * blocks));
  }
  std::printf("\n");
  cudaFree(out);
  cudaFree(clocks);
}

}  // namespace

int main() {
  const uint32_t c = 0x3c013c01u, d = 0x12345677u, mask = 0x3b603b60u;
  constexpr int kInstructions = 8 * kUnrolled;
  std::printf("%-52s %7s %7s %7s\n", "clocks a scheduler; warps:", "2", "4", "8");
  print("multiply-add, three registers", singles<kMultiply>, c, d, kInstructions);
  print("logic", singles<kLogic>, c, d, kInstructions);
  print("funnel shift", singles<kShift>, c, d, kInstructions);
  print("multiply-add and logic", singles<kMultiplyAndLogic>, c, d, kInstructions);
  print("FP16 multiply-add of pairs", singles<kHalf2>, c, d, kInstructions);
  print("mma m16n8k16 FP16", singles<kMma>, c, d, kInstructions);
  print("mma m16n8k32 bytes", singles<kIntegerMma>, c, d, kInstructions);
  print("mma and four logic", singles<kMmaAndLogic>, c, d, kInstructions);
  print("mma and four multiply-add", singles<kMmaAndMultiply>, c, d, kInstructions);
  print("mcg tile, decoded only", tiles<false, false, false>, kMultiplier, mask, kUnrolled);
  print("mcg tile, decoded only, multiplier in a register", tiles<false, true, false>, kMultiplier,
        mask, kUnrolled);
  print("mcg tile", tiles<false, false, true>, kMultiplier, mask, kUnrolled);
  print("mcg tile, multiplier in a register", tiles<false, true, true>, kMultiplier, mask,
        kUnrolled);
  print("mul1 tile, decoded only", tiles<true, false, false>, kMultiplier, mask, kUnrolled);
  print("mul1 tile", tiles<true, false, true>, kMultiplier, mask, kUnrolled);
  print("mul1 tile, multiplier in a register", tiles<true, true, true>, kMultiplier, mask,
        kUnrolled);
  const cudaError_t error = cudaDeviceSynchronize();
  if (error != cudaSuccess) std::fprintf(stderr, "pipes: %s\n", cudaGetErrorString(error));
  return error == cudaSuccess ? 0 : 1;
}
