// Trellis search on the CPU: the states that code one 16x16 tile best.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trellis {

// Bytes of scratch one call needs (64-byte aligned by the caller); 0 for a tile size that is no
// rate. Contents need not survive between calls. Untouched parts stay untouched, so a lazily
// committed allocation costs less memory than this upper bound says.
size_t search_scratch_bytes(int tile_words);

// target: 256 floats in stream order. values: the 65,536 codebook values as float32, 64-byte
// aligned. tile_words: 16 * bits, bits in 1..8, or 24, 40, 56 (half rates: even positions carry
// floor(bits), odd positions one bit more). Writes 256 states that form a closed (tail-biting)
// path, whatever the targets are; a NaN counts as 0. The result depends on the arguments alone.
using SearchTile = void (*)(const float* target, const float* values, int tile_words, void* scratch,
                            uint16_t* states);

void search_tile_generic(const float* target, const float* values, int tile_words, void* scratch,
                         uint16_t* states);
#ifdef TRELLIS_X86
void search_tile_avx2(const float* target, const float* values, int tile_words, void* scratch,
                      uint16_t* states);
// Needs AVX-512 F, BW, DQ, VL.
void search_tile_avx512(const float* target, const float* values, int tile_words, void* scratch,
                        uint16_t* states);
#endif

}  // namespace trellis
