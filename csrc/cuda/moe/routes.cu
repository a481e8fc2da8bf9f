// Around the products: routes sorted by expert, their rows rotated, and their results added up.
#include "../gemm/launch.cuh"
#include "routes.h"
#include "shares.cuh"

namespace trellis::cuda {
namespace {

constexpr int kSortThreads = 1024;
constexpr int kWarpsPerBlock = 8;

// The sum of the values of this lane and those before it.
__device__ __forceinline__ long long sum_up_to_lane(long long value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const long long other = __shfl_up_sync(0xFFFFFFFFu, value, step);
    if (lane >= step) value += other;
  }
  return value;
}

// Sums of the block's threads up to this one, and of all. `sums`: of warps, in shared memory.
__device__ __forceinline__ long long sum_up_to_thread(long long value, long long* sums,
                                                      long long& all) {
  const int thread = threadIdx.x, lane = thread % 32;
  long long sum = sum_up_to_lane(value, lane);
  if (lane == 31) sums[thread / 32] = sum;
  __syncthreads();
  if (thread < 32) sums[thread] = sum_up_to_lane(sums[thread], lane);
  __syncthreads();
  if (thread >= 32) sum += sums[thread / 32 - 1];
  all = sums[kSortThreads / 32 - 1];
  return sum;
}

// What the sort knows of experts, in shared memory.
struct Sorted {
  int *counts, *starts, *first_row_block;  // rows; where the next one goes
  // For cut_by_cost: of a row block; of all row blocks of the experts before.
  int* costs;
  long long* costs_before;

  __device__ __forceinline__ explicit Sorted(int experts) {
    extern __shared__ __align__(8) int sort_memory[];
    counts = sort_memory;
    starts = counts + experts;
    first_row_block = starts + experts;
    costs = first_row_block + experts;
    costs_before = reinterpret_cast<long long*>(costs + experts);
  }
  static constexpr int kBytes = 4 * 4 + 8, kTileBytes = 3 * 4;  // of an expert

  // `rows`: of a row block.
  __device__ __forceinline__ int row_blocks_of(int expert, int rows) const {
    return (counts[expert] + rows - 1) / rows;
  }
};

// A bit for each cost that a rate of an expert has.
template <bool kDown>
__device__ __forceinline__ uint32_t kinds_of(const Moe& m, int64_t expert) {
  const Units<kDown> units(m);
  uint32_t kinds = 0;
  for (int pass = 0; pass < units.passes; ++pass)
    for (int64_t slice = 0; slice < m.slices; ++slice) {
      const int64_t tile_words = tile_words_of(m, units.which(pass), expert, slice);
      if (tile_words != 0) kinds |= 1u << cost_of_rate(tile_words);
    }
  return kinds;
}

// Leaves the first piece of every thread block: that begins where its part of all costs does, or the one after. Not
// inlined: where rates do not differ, or pieces are few, nobody fetches these instructions. For all threads; an equal
// share of the experts, [first, last), each.
template <bool kDown>
__device__ __noinline__ void cut_by_cost(const Moe& m, const MoeScratch& s, int row_blocks,
                                         int first, int last, long long* sums) {
  const Units<kDown> units(m);
  const Sorted sorted(static_cast<int>(m.experts));
  const int rows = s.row_groups * 8, column_blocks = units.column_blocks;
  long long mine = 0, all;
  for (int e = first; e < last; ++e) {
    int cost = 0;
    for (int64_t slice = 0; slice < m.slices; ++slice)
      cost += Costs<kDown>(m, units, e, slice).of_unit * column_blocks;
    sorted.costs[e] = cost;
    mine += static_cast<long long>(sorted.row_blocks_of(e, rows)) * cost;
  }
  __syncthreads();
  long long before = sum_up_to_thread(mine, sums, all) - mine;
  for (int e = first; e < last; ++e) {
    sorted.costs_before[e] = before;
    before += static_cast<long long>(sorted.row_blocks_of(e, rows)) * sorted.costs[e];
  }
  __syncthreads();
  for (int block = threadIdx.x; block <= s.grid; block += kSortThreads) {
    int& begin = s.begins[kDown * (s.grid + 1) + block];
    begin = units.all(m, row_blocks);
    if (block == s.grid) break;
    const long long target = all * block / s.grid;
    int expert = 0;  // the last one that begins there or before: it has rows
    for (int end = static_cast<int>(m.experts); expert + 1 < end;) {
      const int middle = (expert + end) / 2;
      (sorted.costs_before[middle] <= target ? expert : end) = middle;
    }
    const int cost = sorted.costs[expert];
    const long long in_expert = target - sorted.costs_before[expert];
    const int nth = static_cast<int>(in_expert / cost);
    int within = static_cast<int>(in_expert - static_cast<long long>(nth) * cost);
    int64_t slice = 0;
    Costs<kDown> costs(m, units, expert, slice);
    while (within >= costs.of_unit * column_blocks) {
      within -= costs.of_unit * column_blocks;
      costs = Costs<kDown>(m, units, expert, ++slice);
    }
    const int column_block = within / costs.of_unit;
    const int64_t sliced = (sorted.first_row_block[expert] + nth) * m.slices + slice;
    const int unit = static_cast<int>(sliced) * column_blocks + column_block;
    begin = unit * units.pieces + costs.piece_at(units, within - column_block * costs.of_unit);
  }
  __syncthreads();
}

// One block. Which row of its expert a route becomes is left to chance: no sum depends on it.
__global__ void __launch_bounds__(kSortThreads)
    sort_routes(const __grid_constant__ Moe m, const __grid_constant__ MoeScratch s,
                const int routes) {
  __shared__ long long warp_sums[kSortThreads / 32];
  __shared__ uint32_t kinds[2];
  let_next_kernel_start();
  const int experts = static_cast<int>(m.experts);
  const bool tiles = are_tiles(s.row_groups);
  const Sorted sorted(experts);
  int *const counts = sorted.counts, *const starts = sorted.starts;
  const int thread = threadIdx.x, rows = s.row_groups * 8;
  if (thread < 2) kinds[thread] = 0;
  for (int e = thread; e < experts; e += kSortThreads) counts[e] = 0;
  __syncthreads();
  uint32_t inner_kinds = 0, hidden_kinds = 0;  // on their way while routes are counted
  for (int e = thread; e < experts && !tiles; e += kSortThreads)
    inner_kinds |= kinds_of<false>(m, e), hidden_kinds |= kinds_of<true>(m, e);
  for (int i = thread; i < routes; i += kSortThreads) {
    const int expert = expert_of(m, i);
    s.slot[i] = expert;
    if (expert >= 0) atomicAdd(counts + expert, 1);
  }
  if (inner_kinds != 0) atomicOr(kinds, inner_kinds);
  if (hidden_kinds != 0) atomicOr(kinds + 1, hidden_kinds);
  __syncthreads();

  // Exclusive sums of the experts' row blocks and eights of slots, an equal share of the experts a thread. Both
  // in one number: rows come in blocks of eights, or an expert's last block ends where its rows do.
  const int eights_of_block = tiles ? 1 : s.row_groups;
  const int share = (experts + kSortThreads - 1) / kSortThreads;
  const int first = min(thread * share, experts), last = min(first + share, experts);
  const auto slots_of = [&](int e) {
    return (counts[e] + eights_of_block * 8 - 1) / (eights_of_block * 8) * eights_of_block * 8;
  };
  long long mine = 0;
  for (int e = first; e < last; ++e)
    mine += (static_cast<long long>(sorted.row_blocks_of(e, rows)) << 32) + slots_of(e);
  long long all;
  const long long sum = sum_up_to_thread(mine, warp_sums, all) - mine;
  int row_block = static_cast<int>(sum >> 32), slot_of_first = static_cast<int>(sum);
  const int row_blocks = static_cast<int>(all >> 32);
  for (int e = first; e < last; ++e) {
    const int slots = slots_of(e);
    starts[e] = slot_of_first;
    sorted.first_row_block[e] = row_block;
    for (int b = 0; b < sorted.row_blocks_of(e, rows); ++b, ++row_block) {
      s.expert[row_block] = e;
      if (tiles)
        s.first[row_block] = slot_of_first + b * rows;
      else
        s.rows[row_block] = min(rows, counts[e] - b * rows);
    }
    for (int r = counts[e]; tiles && r < slots; ++r) s.route[slot_of_first + r] = -1;
    slot_of_first += slots;
  }
  const auto to_cut = [&](const auto& units, uint32_t of_rates) {
    return __popc(of_rates) > 1 && units.all(m, row_blocks) >= kPiecesToCut * s.grid;
  };
  const bool cut_inner = !tiles && to_cut(Units<false>(m), kinds[0]);
  const bool cut_hidden = !tiles && to_cut(Units<true>(m), kinds[1]);
  if (thread == 0) {
    s.count[0] = row_blocks;
    s.count[1] = static_cast<int>(all);
    s.count[2] = cut_inner;
    s.count[3] = cut_hidden;
  }
  __syncthreads();
  if (cut_inner) cut_by_cost<false>(m, s, row_blocks, first, last, warp_sums);
  if (cut_hidden) cut_by_cost<true>(m, s, row_blocks, first, last, warp_sums);
  for (int i = thread; i < routes; i += kSortThreads) {
    const int expert = s.slot[i];
    if (expert < 0) continue;
    const int slot = atomicAdd(starts + expert, 1);
    s.slot[i] = slot;
    if (tiles) s.route[slot] = i;
  }
  const int of_block = static_cast<int>(m.slices) * 3;
  for (int i = thread; i < row_blocks * of_block; i += kSortThreads) {
    const int row_block = i / of_block, which = i % 3;
    const int64_t matrix = s.expert[row_block] * m.slices + (i - row_block * of_block) / 3;
    const int64_t* const entry = m.table + (which * m.experts * m.slices + matrix) * 2;
    s.matrices[i] = longlong2{entry[0], entry[1]};
  }
  if (tiles) return;
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
  const int bytes = static_cast<int>(m.experts) *
                    (are_tiles(scratch.row_groups) ? Sorted::kTileBytes : Sorted::kBytes);
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
