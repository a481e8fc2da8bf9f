// Constants of the trellis search that every instruction set shares.
#pragma once

namespace trellis {

// Positions before the seam from which the search starts, given the bits of two positions. A start
// that is off costs quality only until survivors merge, and those merge late at low rates.
constexpr int search_window(int bits_of_two) {
  return bits_of_two <= 3 ? 64 : bits_of_two <= 6 ? 48 : bits_of_two <= 8 ? 32 : 24;
}

// Integer search, in multiples of the largest codebook value: targets it takes, and the difference
// that 16 bits hold.
constexpr float kReach = 1.1f;
constexpr float kRange = 1.3f;

}  // namespace trellis
