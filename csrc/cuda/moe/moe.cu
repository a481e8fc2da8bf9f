// Routed experts: launches for a chunk of tokens, none of which the host waits for. Few routes: rotate, gate and up,
// rotate what comes of them, down, add. Few rows of an expert: sort, rotate, gate and up with the activation, down, add.
// Many rows, as tiles: these five and a launch for the activation.
#include <algorithm>

#include "../gemm/launch.cuh"
#include "experts.cuh"
#include "few_routes.h"
#include "routes.h"

namespace trellis::cuda {
namespace {

// Routes that go through the launches together: as many as have rows of so many terms (plan.h).
constexpr int64_t kChunkTerms = 32768;
// Tokens up to which a row's bits must not depend on their number: tiles sum in another order.
constexpr int64_t kInvariantTokens = 128;
// Rows of an average expert from which on blocks of 16 rows, tiles and tall tiles are faster.
constexpr int64_t kSixteenFrom = 7, kTilesFrom = 12, kTallFrom = 112;

struct Sizes {
  int64_t top_k, experts, slices, hidden, inner;
};

int64_t chunk_routes(int64_t top_k, int terms) { return std::max(kChunkTerms / terms, top_k); }

// Row groups of a row block, by the tokens that go through the launches together.
int row_groups_of(int64_t tokens, const Sizes& z, bool wgmma) {
  const int64_t average = tokens * z.top_k / z.experts;
  const bool tiles = average >= kTilesFrom && tokens > kInvariantTokens;
  if (tiles) return wgmma && average >= kTallFrom ? kTallGroups : kTileGroups;
  return average >= kSixteenFrom ? 2 : 1;
}

// `hit`: experts that may have a row.
MoeScratch take_scratch(const Sizes& z, int64_t routes, int64_t hit, int terms, int row_groups,
                        int grid, Arena& arena) {
  MoeScratch s = {};
  const bool tiles = are_tiles(row_groups);
  const int64_t rows = row_groups * 8;
  const int64_t row_blocks = std::min(routes, routes / rows + hit);
  s.slots = tiles ? (routes / 8 + hit) * 8 : row_blocks * rows;
  s.row_groups = row_groups;
  s.grid = grid;
  s.count = arena.take<int>(4);
  s.expert = arena.take<int>(row_blocks);
  if (tiles)
    s.first = arena.take<int>(row_blocks), s.route = arena.take<int>(s.slots);
  else
    s.rows = arena.take<int>(row_blocks), s.begins = arena.take<int>(2 * (grid + 1));
  s.matrices = arena.take<longlong2>(row_blocks * z.slices * 3);
  s.slot = arena.take<int>(routes);
  // x, for gate and for up, and what down takes: terms of two bytes.
  s.x = arena.take<uint32_t>(s.slots * z.slices * z.hidden * terms);
  s.inner = arena.take<uint32_t>(s.slots * z.slices * z.inner / 2 * terms);
  const int64_t scales = tiles ? 1 : z.hidden / 128, inner_scales = tiles ? 1 : z.inner / 128;
  s.x_scales = arena.take<float>(s.slots * z.slices * 2 * scales);
  s.inner_scales = arena.take<float>(s.slots * z.slices * inner_scales);
  if (tiles) {
    s.sums = arena.take<float>(s.slots * z.slices * 2 * z.inner);
    s.results = reinterpret_cast<float*>(s.x);  // which gate and up are done with
    return s;
  }
  s.arrived_inner = arena.take<unsigned>(row_blocks * z.slices * z.inner / 128);
  s.arrived_hidden = arena.take<unsigned>(row_blocks * z.slices * z.hidden / 128);
  s.parts = arena.take<float>(static_cast<int64_t>(grid) * 2 * 2 *
                              segments_of(std::max(z.hidden, z.inner) / 128) * row_groups *
                              kUnitQuads * 4);
  s.results = arena.take<float>(s.slots * z.slices * z.hidden);
  return s;
}

FewScratch take_few_scratch(const Sizes& z, int64_t routes, Arena& arena) {
  FewScratch s;
  const int64_t rows = routes * z.slices;
  for (const bool down : {false, true}) {  // two terms of two bytes; gate and up may have one each
    const int64_t inputs = down ? z.inner : 2 * z.hidden;
    s.rows[down] = arena.take<uint4>(rows * inputs / 4);
    s.scales[down] = arena.take<float>(rows * inputs / 128);
  }
  s.sums = arena.take<float>(routes * z.slices * 2 * z.inner);
  s.results = arena.take<float>(routes * z.slices * z.hidden);
  return s;
}

// Enough for these tokens and sizes and for any smaller ones, whichever way they go. A way that begins at some rows of
// an average expert has no more experts than that leaves, and one that ends there no more routes.
int64_t enough_bytes(int64_t tokens, const Sizes& z, int grid) {
  int64_t most = 0;
  for (const int terms : {1, 2}) {
    const int64_t routes = std::min(tokens * z.top_k, chunk_routes(z.top_k, terms));
    const int64_t few =
        std::min(routes, std::max(kInvariantTokens * z.top_k, kTilesFrom * z.experts));
    const auto use = [&](int row_groups, int64_t most_routes, int64_t rows_from) {
      Arena arena(nullptr);
      take_scratch(z, most_routes, std::min(z.experts, most_routes / rows_from), terms, row_groups,
                   grid, arena);
      most = std::max(most, arena.bytes());
    };
    use(1, few, 1), use(2, few, kSixteenFrom);
    // Tall tiles need no more: as many slots in fewer row blocks.
    if (tokens > kInvariantTokens) use(kTileGroups, routes, kTilesFrom);
  }
  Arena arena(nullptr);
  take_few_scratch(z, std::min<int64_t>(tokens * z.top_k, kFewRoutes), arena);
  return std::max(most, arena.bytes());
}

cudaError_t launch_few_rows(bool exact, const Moe& m, MoeScratch s, cudaStream_t stream) {
  const int terms = exact ? 2 : 1;
  // Half as many blocks where a multiprocessor has room for one only.
  static_assert(ExpertShape<1, 1>::kBlocks == 2 && ExpertShape<1, 2>::kBlocks == 2 &&
                ExpertShape<2, 1>::kBlocks == 2 && ExpertShape<2, 2>::kBlocks == 1);
  if (s.row_groups == 2 && exact) s.grid /= 2;
  cudaError_t error = launch_sort(m, s, stream);
  if (error == cudaSuccess) error = launch_rotate_routes(m, s, terms, stream);
  for (const bool down : {false, true}) {
    if (error != cudaSuccess) return error;
    if (s.row_groups == 2)
      error = exact ? launch_experts<2, true>(down, m, s, stream)
                    : launch_experts<2, false>(down, m, s, stream);
    else
      error = exact ? launch_experts<1, true>(down, m, s, stream)
                    : launch_experts<1, false>(down, m, s, stream);
  }
  return error == cudaSuccess ? launch_add(m, s, stream) : error;
}

cudaError_t launch_many_rows(bool exact, bool wgmma, const Moe& m, const MoeScratch& s,
                             cudaStream_t stream) {
  const int terms = exact ? 2 : 1;
  cudaError_t error = launch_sort(m, s, stream);
  if (error == cudaSuccess) error = launch_rotate_slots(m, s, terms, stream);
  for (const bool down : {false, true}) {
    if (error == cudaSuccess && s.row_groups == kTallGroups)
      error = exact ? launch_tall_tiles_of_experts<2>(down, m, s, s.grid / 2, stream)
                    : launch_tall_tiles_of_experts<1>(down, m, s, s.grid / 2, stream);
    else if (error == cudaSuccess && wgmma)
      error = exact ? launch_wide_tiles_of_experts<2>(down, m, s, s.grid, stream)
                    : launch_wide_tiles_of_experts<1>(down, m, s, s.grid, stream);
    else if (error == cudaSuccess)
      error = exact ? launch_tiles_of_experts<2>(down, m, s, s.grid, stream)
                    : launch_tiles_of_experts<1>(down, m, s, s.grid, stream);
    if (error == cudaSuccess && !down) error = launch_activate_slots(m, s, terms, stream);
  }
  return error == cudaSuccess ? launch_add_slots(m, s, stream) : error;
}

}  // namespace

MoePlan moe_plan(int64_t tokens, int64_t top_k, int64_t experts, int64_t slices, int64_t hidden,
                 int64_t inner, int sm_count) {
  MoePlan plan = {};
  plan.grid = 2 * sm_count;
  plan.bytes = enough_bytes(tokens, {top_k, experts, slices, hidden, inner}, plan.grid);
  return plan;
}

cudaError_t launch_moe(const Moe& all, const MoePlan& plan, void* workspace, cudaStream_t stream) {
  // Values unrounded cost FP32 and FP16 results half of their error bound, and BF16 ones nothing.
  const bool exact = all.y_dtype != trellis::DType::BFloat16;
  const int terms = exact ? 2 : 1;
  const Sizes z{all.top_k, all.experts, all.slices, all.hidden, all.inner};
  const int64_t chunk = std::min(all.tokens, chunk_routes(z.top_k, terms) / z.top_k);
  int row_groups = row_groups_of(chunk, z, plan.wgmma);
  // Where shared memory is short, eight rows at a time: the same sums.
  if (row_groups == 2 && attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin) <
                             (exact ? ExpertShape<2, 2>::kShared : ExpertShape<2, 1>::kShared))
    row_groups = 1;
  const auto skip = [](const void* p, int64_t bytes) {
    return static_cast<const void*>(static_cast<const char*>(p) + bytes);
  };
  const auto size_of = [](trellis::DType dtype) { return dtype == trellis::DType::Float ? 4 : 2; };
  for (int64_t token = 0; token < all.tokens; token += chunk) {
    Moe m = all;
    m.tokens = std::min(chunk, all.tokens - token);
    m.x = skip(all.x, token * all.columns * size_of(all.x_dtype));
    m.ids = skip(all.ids, token * all.top_k * (all.wide_ids ? 8 : 4));
    m.weights = skip(all.weights, token * all.top_k * size_of(all.weights_dtype));
    m.y = static_cast<char*>(all.y) + token * all.columns * size_of(all.y_dtype);
    Arena arena(workspace);
    const FewPlan few = plan_few_routes(m, exact);
    cudaError_t error;
    if (plan.few_routes == FewRoutes::WhereTheyCan && few.rows == 0) return cudaErrorNotSupported;
    if (plan.few_routes == FewRoutes::WhereTheyCan ||
        (plan.few_routes == FewRoutes::WhereBest && few.is_best)) {
      error =
          launch_few_routes(exact, m, take_few_scratch(z, m.tokens * m.top_k, arena), few, stream);
    } else {
      const int64_t routes = chunk * z.top_k;
      const MoeScratch s =
          take_scratch(z, routes, std::min(z.experts, routes), terms, row_groups, plan.grid, arena);
      error = are_tiles(s.row_groups) ? launch_many_rows(exact, plan.wgmma, m, s, stream)
                                      : launch_few_rows(exact, m, s, stream);
    }
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace trellis::cuda
