// The decoding of experts' tiles, at a rate and with a codebook known at run time, and their products by wgmma.
#pragma once

#include "../common/hopper.cuh"
#include "tiles.cuh"

#ifdef TRELLIS_SM90A
namespace trellis::cuda {

__device__ __forceinline__ int kind_of(int tile_words, int codebook) {
  return codebook * 15 + tile_words / 8 - 2;
}
// f(rate, codebook), both known at compile time, by one jump: what with_rate and with_codebook do by two.
template <typename F>
__device__ __forceinline__ void with_kind(int kind, F f) {
#define TRELLIS_KIND(words, codebook) \
  case codebook * 15 + words / 8 - 2: \
    return f(std::integral_constant<int, words>{}, std::integral_constant<int, codebook>{});
#define TRELLIS_KINDS(codebook) \
  TRELLIS_KIND(16, codebook)    \
  TRELLIS_KIND(32, codebook)    \
  TRELLIS_KIND(48, codebook)    \
  TRELLIS_KIND(64, codebook)    \
  TRELLIS_KIND(80, codebook)    \
  TRELLIS_KIND(96, codebook) TRELLIS_KIND(112, codebook) TRELLIS_KIND(128, codebook)
  switch (kind) {
    TRELLIS_KINDS(kInst3)
    TRELLIS_KINDS(kMcg)
    TRELLIS_KINDS(kMul1)
    TRELLIS_KIND(24, kMul1)
    TRELLIS_KIND(40, kMul1)
    TRELLIS_KIND(56, kMul1)
  }
#undef TRELLIS_KINDS
#undef TRELLIS_KIND
}

// One warp's tiles. The rate is chosen around decoding alone: ptxas waits for each wgmma in a function that is called (its
// remark C7510) and in one that holds the loop for every rate (C7512). kPacked: where packed words begin in a stage.
template <int kPacked>
struct TileDecoder {
  int kind, byte[3], skew;  // of the lane's words in a packed tile
  uint32_t packed_at;       // the warp's first tile in a stage

  __device__ explicit TileDecoder(const TileItem& item)
      : kind(hold(static_cast<uint32_t>(kind_of(item.tile_words, item.codebook)))),
        packed_at(hold(kPacked + threadIdx.x / 32 * item.tile_words * 2)) {
    const int lane = threadIdx.x % 32;
    with_rate(item.tile_words, [&](auto rate) TRELLIS_INLINE_LAMBDA {
      const Window<rate.value> window(lane);
#pragma unroll
      for (int i = 0; i < 3; ++i) byte[i] = window.index[i] * 4;
      skew = window.skew;
    });
  }

  // The fragments of k tiles from `first` on of the step that lies at `stage`.
  template <int kCount>
  __device__ __forceinline__ void decode(uint32_t stage, int first, const PowersOfTwo& powers,
                                         uint32_t (&fragments)[kCount][4]) const {
    with_kind(kind, [&](auto rate, auto codebook) TRELLIS_INLINE_LAMBDA {
      constexpr int kTileWords = rate.value, kCodebook = codebook.value;
      const Hash hash = hash_for<kCodebook>();
      Window<kTileWords> window(0);
#pragma unroll
      for (int i = 0; i < 3; ++i) window.index[i] = byte[i];
      window.skew = skew;
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        uint32_t v[3], p[8];
        const uint32_t tile = stage + packed_at + (first + i) * kTileWords * 16;
        load_stretch<kTileWords>([=](int at) { return load_shared(tile + at); }, window, v);
        products<kTileWords, kCodebook != kMul1>(v, hash, powers, p);
        packed_values<kCodebook == kMul1>(p, fragments[i]);
      }
    });
  }
};

// Starts the products of k tiles from `first` on with the rows at `stage`, and waits for those before.
template <int kTerms, int kRows, int kCount>
__device__ __forceinline__ void multiply_fragments(uint32_t stage, int first,
                                                   const uint32_t (&fragments)[kCount][4],
                                                   float (&sums)[kRows / 2]) {
  wgmma_fence();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int term = 0; term < kTerms; ++term)  // an atom is 64 units of 16 bytes
      wgmma_f16<kRows>(sums, fragments[i],
                       wgmma_descriptor(stage / 16 + (first + i) * 2 + term * 64, kTerms * 1024));
  }
  wgmma_commit();
  wgmma_wait<1>();
}

// Adds up a step that lies at `stage`; some k tiles are decoded while the tensor cores work on as many others.
// `before_is_done` runs as soon as they are done with the step before.
template <int kTerms, int kRows, int kPacked, typename F>
__device__ __forceinline__ void multiply_step(const TileDecoder<kPacked>& decoder, uint32_t stage,
                                              const PowersOfTwo& powers, float (&sums)[kRows / 2],
                                              F before_is_done) {
  constexpr int kGroup = 2;
  uint32_t a[2][kGroup][4];
#pragma unroll
  for (int first = 0; first < kTileSteps; first += kGroup) {
    auto& fragments = a[first / kGroup];
    decoder.decode(stage, first, powers, fragments);
    multiply_fragments<kTerms, kRows>(stage, first, fragments, sums);
    if (first == 0) before_is_done();
  }
}

}  // namespace trellis::cuda
#endif
