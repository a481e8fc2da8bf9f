// Constants of the trellis search that every instruction set shares.
#pragma once

namespace trellis {

// Positions on each side of the seam that the first pass looks at. Survivors merge late (hundreds of
// paths are nearly as good as the best), hence so long.
constexpr int search_window(int bits_of_two) { return bits_of_two <= 8 ? 40 : 32; }

// Integer search, in multiples of the largest codebook value: targets it takes, and the difference
// that 16 bits hold.
constexpr float kReach = 1.1f;
constexpr float kRange = 1.3f;

}  // namespace trellis
