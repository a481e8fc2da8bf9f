// A rate known at run time as one known at compile time. No torch headers.
#pragma once

#include <type_traits>

#include "cpu/codebook.h"
#include "cpu/numeric.h"

#ifdef __CUDACC__
#define TRELLIS_INLINE __forceinline__
// For a lambda, behind its parameters.
#define TRELLIS_INLINE_LAMBDA __attribute__((always_inline))
#else
#define TRELLIS_INLINE inline
#endif

namespace trellis {

// f(std::integral_constant<int, tile_words>{}), for a rate that the bindings have checked.
template <typename F>
TRELLIS_ANYWHERE TRELLIS_INLINE auto with_rate(int tile_words, F f) {
  switch (tile_words) {
    case 16:
      return f(std::integral_constant<int, 16>{});
    case 24:
      return f(std::integral_constant<int, 24>{});
    case 32:
      return f(std::integral_constant<int, 32>{});
    case 40:
      return f(std::integral_constant<int, 40>{});
    case 48:
      return f(std::integral_constant<int, 48>{});
    case 56:
      return f(std::integral_constant<int, 56>{});
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 80:
      return f(std::integral_constant<int, 80>{});
    case 96:
      return f(std::integral_constant<int, 96>{});
    case 112:
      return f(std::integral_constant<int, 112>{});
    default:
      return f(std::integral_constant<int, 128>{});
  }
}

// f(std::integral_constant<int, codebook>{}) for 3inst, mcg or mul1. Half rates exist for mul1 only, which the
// bindings check, and nothing is instantiated for the others.
template <int kTileWords, typename F>
TRELLIS_ANYWHERE TRELLIS_INLINE auto with_codebook(int codebook, F f) {
  if constexpr (kTileWords % 16 == 0) {
    if (codebook == kInst3) return f(std::integral_constant<int, kInst3>{});
    if (codebook == kMcg) return f(std::integral_constant<int, kMcg>{});
  }
  return f(std::integral_constant<int, kMul1>{});
}

}  // namespace trellis
