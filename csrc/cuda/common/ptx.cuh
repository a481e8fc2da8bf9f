// The few PTX instructions that CUDA C++ has no name for. Everything for sm_90 and later is guarded:
// older targets never reach those lines.
#pragma once

#include <cstdint>

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define TRELLIS_SM90 1
#endif

namespace trellis::cuda {

// c[16 x 8] += a[16 x 16] b[16 x 8], FP16 in, FP32 sums.
__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                        uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// c[16 x 8] += a[16 x 32] b[32 x 8], unsigned times signed bytes, exact INT32 sums.
__device__ __forceinline__ void mma_u8s8(int (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                         uint32_t a3, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The value, in a register: the compiler would otherwise rather compute some again in every loop, down
// to reading slow special registers.
__device__ __forceinline__ uint32_t hold(uint32_t value) {
  uint32_t held;
  asm volatile("mov.b32 %0, %1;" : "=r"(held) : "r"(value));
  return held;
}

__device__ __forceinline__ uint64_t hold(uint64_t value) {
  uint64_t held;
  asm volatile("mov.b64 %0, %1;" : "=l"(held) : "l"(value));
  return held;
}

__device__ __forceinline__ uint32_t load_shared(uint32_t address) {
  uint32_t value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(address));
  return value;
}

__device__ __forceinline__ uint2 load_shared_pair(uint32_t address) {
  uint2 value;
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
  return value;
}

// From memory that the compiler cannot tell to be global; in order with other volatile accesses.
__device__ __forceinline__ float2 load_global_pair(const float* p) {
  float2 value;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(value.x), "=f"(value.y) : "l"(p));
  return value;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// `threads` of the block, which all name the same barrier (1 to 15).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Four 8 x 8 matrices of FP16 from shared memory, a row's address from each lane: the B fragments of two
// groups of eight rows by 16 inputs.
__device__ __forceinline__ void load_matrices(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// Brings a line into the second-level cache.
__device__ __forceinline__ void prefetch(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// For what is read once: it makes room in the second-level cache before anything else does, so that a
// layer's weights leave activations, and the kernels' own instructions, where they are.
__device__ __forceinline__ uint64_t evict_first() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ uint64_t evict_normally() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- programmatic dependent launch: this kernel may start before the one in front has ended -------
__device__ __forceinline__ void wait_for_previous_kernel() {
#ifdef TRELLIS_SM90
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void let_next_kernel_start() {
#ifdef TRELLIS_SM90
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// For an op's first kernel: nothing of it runs before everything in front is there. What is launched next may
// then read, before its own wait, whatever came before the op.
__device__ __forceinline__ void begin_after_previous_kernel() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

// Adds to a counter; orders this block's writes (a block barrier must lie between) before it, and what other
// blocks wrote before their own arrivals after it. Returns the count before.
__device__ __forceinline__ unsigned arrive(unsigned* counter, unsigned amount = 1) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;"
               : "=r"(before)
               : "l"(counter), "r"(amount)
               : "memory");
  return before;
}

// Such a counter, in order with what other blocks wrote before they arrived.
__device__ __forceinline__ unsigned arrivals(const unsigned* counter) {
  unsigned count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}

// ---- asynchronous copies, 16 bytes a thread, past the first-level cache ---------------------------
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_16(void* to, const void* from) {
  copy_async_16(shared_address(to), from);
}

// Look at the machine code where these are used: in a kernel whose stages lie at a constant address ptxas 13.0
// gave the copies registers that nobody had written, and the GPU called them illegal instructions.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "l"(policy)
               : "memory");
}

__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Until at most kPending of this thread's groups are unfinished.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

}  // namespace trellis::cuda
