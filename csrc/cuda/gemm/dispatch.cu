// Which kernel computes y, chosen below the op so that a compiled graph serves every number of rows.
#include <algorithm>
#include <iterator>

#include "problem.h"

namespace trellis::cuda {
namespace {

// What a launch of its own takes for the rows over a multiple of 256, as measured: for each step of a matrix that is
// dealt out to all workers of 256 rows, and besides; both in those workers' steps.
struct LaunchCost {
  int64_t rows;
  double step, besides;
};
constexpr LaunchCost kLaunchCosts[] = {
    {8, 0.4, 9}, {16, 0.65, 9}, {32, 0.58, 18}, {64, 0.55, 22}, {128, 0.68, 24}};

bool costs_less_apart(const Gemm& g, int64_t over, const Gpu& gpu) {
  const LaunchCost* cost = std::find_if(std::begin(kLaunchCosts), std::end(kLaunchCosts),
                                        [over](const LaunchCost& c) { return over <= c.rows; });
  if (cost == std::end(kLaunchCosts)) return false;
  Gemm whole_tiles = g;
  whole_tiles.m -= over;
  const TileSchedule all = tile_schedule(g, Route::Wide256, gpu.sm_count, 0);
  const TileSchedule without = tile_schedule(whole_tiles, Route::Wide256, gpu.sm_count, 0);
  const int64_t workers = gpu.sm_count / all.cluster;
  const double matrix = static_cast<double>(all.columns) * all.steps / static_cast<double>(workers);
  return static_cast<double>(all.cost - without.cost) > cost->step * matrix + cost->besides;
}

}  // namespace

bool can_run(Route route, const Gpu& gpu) {
  // wgmma exists on 9.0 alone.
  return route == Route::Small || route == Route::Tiled128 || gpu.capability == 90;
}

Route choose_route(const Gemm& g, const Gpu& gpu) {
  if (g.m <= kSmallMaximum) return Route::Small;
  // Two launches for few rows decode twice, a tile half empty multiplies twice.
  if (!can_run(Route::Wide64, gpu)) return g.m <= 64 ? Route::Small : Route::Tiled128;
  return g.m <= 64 ? Route::Wide64 : g.m <= 128 ? Route::Wide128 : Route::Wide256;
}

int64_t rows_at_once(const Gemm& g, Route route, const Gpu& gpu) {
  if (route == Route::Small) return std::min<int64_t>(g.m, kSmallMaximum);
  const int64_t over = g.m % 256;
  const bool apart = route == Route::Wide256 && over > 0 && costs_less_apart(g, over, gpu);
  return apart ? g.m - over : g.m;
}

}  // namespace trellis::cuda
