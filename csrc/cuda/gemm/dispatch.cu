// Which kernel computes y, chosen below the op so that a compiled graph serves every number of rows.
#include "problem.h"

namespace trellis::cuda {

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

}  // namespace trellis::cuda
