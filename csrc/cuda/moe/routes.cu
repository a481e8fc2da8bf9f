// Around the products: routes sorted by expert, their rows rotated, and their results added up.
#include "../gemm/launch.cuh"
#include "routes.h"
#include "vectors.cuh"

namespace trellis::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kWarpsPerBlock = 8;

// One block. Which row of its expert a route becomes is left to chance: no sum depends on it.
__global__ void __launch_bounds__(kSortThreads)
    sort_routes(const Moe m, const MoeScratch s, const int routes) {
  extern __shared__ int counts[];  // [experts], then where an expert's row blocks start
  __shared__ long long warp_sums[kSortThreads / 32];
  let_next_kernel_start();
  const int experts = static_cast<int>(m.experts);
  int* const starts = counts + experts;
  const int thread = threadIdx.x, lane = thread % 32, rows = s.row_groups * 8;
  for (int e = thread; e < experts; e += kSortThreads) counts[e] = 0;
  __syncthreads();
  for (int i = thread; i < routes; i += kSortThreads) {
    const int expert = expert_of(m, i);
    s.slot[i] = expert;
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  __syncthreads();

  // Exclusive sums of the experts' row blocks and eights of slots, an equal share of the experts a thread. Both
  // in one number: rows come in blocks of eights, or an expert's last block ends where its rows do.
  const int eights_of_block = are_tiles(s.row_groups) ? 1 : s.row_groups;
  const int share = (experts + kSortThreads - 1) / kSortThreads;
  const int first = min(thread * share, experts), last = min(first + share, experts);
  const auto row_blocks_of = [&](int e) { return (counts[e] + rows - 1) / rows; };
  const auto slots_of = [&](int e) {
    return (counts[e] + eights_of_block * 8 - 1) / (eights_of_block * 8) * eights_of_block * 8;
  };
  long long mine = 0;
  for (int e = first; e < last; ++e)
    mine += (static_cast<long long>(row_blocks_of(e)) << 32) + slots_of(e);
  long long sum = sum_up_to_lane(mine, lane);
  if (lane == 31) warp_sums[thread / 32] = sum;
  __syncthreads();
  if (thread < 32) warp_sums[thread] = sum_up_to_lane(warp_sums[thread], lane);
  __syncthreads();
  sum += (thread < 32 ? 0 : warp_sums[thread / 32 - 1]) - mine;
  int row_block = static_cast<int>(sum >> 32), slot_of_first = static_cast<int>(sum);
  const int row_blocks = static_cast<int>(warp_sums[kSortThreads / 32 - 1] >> 32);
  for (int e = first; e < last; ++e) {
    const int slots = slots_of(e);
    starts[e] = slot_of_first;
    for (int b = 0; b < row_blocks_of(e); ++b, ++row_block) {
      s.expert[row_block] = e;
      s.rows[row_block] = min(rows, counts[e] - b * rows);
      s.first[row_block] = slot_of_first + b * rows;
    }
    for (int r = counts[e]; r < slots; ++r) s.route[slot_of_first + r] = -1;
    slot_of_first += slots;
  }
  if (thread == 0) {
    s.count[0] = row_blocks;
    s.count[1] = static_cast<int>(warp_sums[kSortThreads / 32 - 1]);
  }
  __syncthreads();
  for (int i = thread; i < routes; i += kSortThreads) {
    const int expert = s.slot[i];
    if (expert < 0) continue;
    const int slot = atomicAdd(starts + expert, 1);
    s.slot[i] = slot;
    s.route[slot] = i;
  }
  const int of_block = static_cast<int>(m.slices) * 3;
  for (int i = thread; i < row_blocks * of_block; i += kSortThreads) {
    const int row_block = i / of_block, which = i % 3;
    const int64_t matrix = s.expert[row_block] * m.slices + (i - row_block * of_block) / 3;
    const int64_t* const entry = m.table + (which * m.experts * m.slices + matrix) * 2;
    s.matrices[i] = longlong2{entry[0], entry[1]};
  }
  if (are_tiles(s.row_groups)) return;
  const int64_t of_inner = row_blocks * m.slices * (m.inner / 128);
  const int64_t of_hidden = row_blocks * m.slices * (m.hidden / 128);
  for (int64_t i = thread; i < of_inner; i += kSortThreads) s.arrived_inner[i] = 0;
  for (int64_t i = thread; i < of_hidden; i += kSortThreads) s.arrived_hidden[i] = 0;
}

// A warp a route, slice, rotation and 128-block. Which slot it is comes last, since the sort may be waited for
// meanwhile.
__global__ void __launch_bounds__(kWarpsPerBlock * 32)
    rotate_routes(const Moe m, const MoeScratch s, const int64_t routes, const int terms) {
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t warp = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int blocks = static_cast<int>(m.hidden / 128);
  const int rotations = one_rotation(m) ? 1 : 2;
  const int block = static_cast<int>(warp % blocks);
  const int64_t rest = warp / blocks;
  const int rotation = static_cast<int>(rest % rotations);
  const int64_t slice = rest / rotations % m.slices, route = rest / rotations / m.slices;
  const int64_t id = route < routes ? expert_of_route(m, route) : -1;
  // A launch of which nobody waits may end before the sort has, and then so may the products' wait for it.
  if (id < 0 || id >= m.experts) return wait_for_previous_kernel();
  float v[4], suh[4];
  load_x(m, route / m.top_k, block * 128 + lane * 4, v);
  const Projection& p = rotations == 2 && rotation == 0 ? m.gate : m.up;
  load_scales(vector_of(p.suh, id * m.slices + slice), block, suh);
  wait_for_previous_kernel();
  const int slot = s.slot[route];
  if (slot < 0) return;
  const int rows = s.row_groups * 8, row_block = slot / rows;
  const int64_t place = (row_block * m.slices + slice) * rotations + rotation;
  write_fragments(v, suh, s.x + place * blocks * 8 * terms * s.row_groups * 64,
                  s.x_scales + place * blocks * rows, block, slot % rows, s.row_groups, terms);
}

__global__ void __launch_bounds__(256) add_routes(const Moe m, const MoeScratch s) {
  const int64_t quads = (m.columns + 3) / 4;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * 256 + threadIdx.x;
  const int64_t token = at / quads;
  wait_for_previous_kernel();
  if (token < m.tokens) add_up(m, s, token, static_cast<int>(at - token * quads) * 4);
}

}  // namespace

cudaError_t launch_sort(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  const int bytes = static_cast<int>(2 * m.experts * sizeof(int));
  cudaError_t error = prefer_shared(sort_routes);
  if (error == cudaSuccess)
    error = cudaFuncSetAttribute(sort_routes, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  sort_routes<<<1, kSortThreads, bytes, stream>>>(m, scratch, static_cast<int>(m.tokens * m.top_k));
  return cudaGetLastError();
}

cudaError_t launch_rotate_routes(const Moe& m, const MoeScratch& scratch, int terms,
                                 cudaStream_t stream) {
  const int64_t routes = m.tokens * m.top_k;
  const int64_t warps = routes * m.slices * (one_rotation(m) ? 1 : 2) * (m.hidden / 128);
  const cudaError_t error = prefer_shared(rotate_routes);
  if (error != cudaSuccess) return error;
  return launch_overlapping(rotate_routes, (warps + kWarpsPerBlock - 1) / kWarpsPerBlock,
                            kWarpsPerBlock * 32, 0, 1, stream, m, scratch, routes, terms);
}

cudaError_t launch_add(const Moe& m, const MoeScratch& scratch, cudaStream_t stream) {
  const int64_t threads = m.tokens * ((m.columns + 3) / 4);
  const cudaError_t error = prefer_shared(add_routes);
  if (error != cudaSuccess) return error;
  return launch_overlapping(add_routes, (threads + 255) / 256, 256, 0, 1, stream, m, scratch);
}

}  // namespace trellis::cuda
