#include "search.h"

#include "search_common.h"

namespace trellis {

size_t search_scratch_bytes(int tile_words) {
  const bool half = tile_words == 24 || tile_words == 40 || tile_words == 56;
  if (!half && (tile_words % 16 != 0 || tile_words < 16 || tile_words > 128)) return 0;
  const int bits = tile_words / 16;
  // Values in step order (two orders at half rates), then the costs before every step and after the
  // last, all float32 in the worst case
  const size_t values = (half ? 2 : 1) * 65536;
  const size_t rows = (257 + search_window(2 * bits + half)) * (size_t{65536} >> bits);
  return (values + rows) * sizeof(float);
}

}  // namespace trellis
