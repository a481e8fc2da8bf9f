// Which kernel computes y, chosen below the op so that a compiled graph serves every number of rows.
#include "problem.h"

namespace trellis::cuda {

bool can_run(Route route, const Gpu& gpu) {
  return route == Route::Small || gpu.capability == 90;  // wgmma exists on 9.0 alone
}

Route choose_route(const Gemm& g, const Gpu& gpu) {
  if (g.m <= kSmallMaximum || !can_run(Route::Wide64, gpu)) return Route::Small;
  return g.m <= 64 ? Route::Wide64 : g.m <= 128 ? Route::Wide128 : Route::Wide256;
}

}  // namespace trellis::cuda
