// The host side of one rate's small kernels; included by small_k*.cu only.
#pragma once

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {

template <int kTileWords, int kCodebook, Operand kOperand, int kRowGroups>
cudaError_t launch_small_kernel(const Gemm& g, const SmallScratch& scratch, int share,
                                cudaStream_t stream) {
  const int64_t blocks = small_stretches(g, share);
  constexpr int kBytes = SmallLayout<kTileWords, kOperand, kRowGroups>::kBytes;
  return launch_overlapping(small_kernel<kTileWords, kCodebook, kOperand, kRowGroups>, blocks,
                            kSmallWarps * 32, shared_for_even_spread(blocks, kBytes), 1, stream, g,
                            scratch, share, powers_of_two());
}

template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share,
                              cudaStream_t stream) {
  const Operand operand = small_operand(g);
  const bool sixteen = small_row_groups(g) == 2;
  return with_codebook<kTileWords>(g.codebook, [&](auto codebook) {
    constexpr int kC = decltype(codebook)::value;
    if constexpr (kC == kMul1) {
      constexpr Operand kPacked = Operand::kPackedMul1, kBytes = Operand::kBytes,
                        kTwoPasses = Operand::kBytesTwoPasses;
      return operand == kBytes
                 ? launch_small_kernel<kTileWords, kC, kBytes, 1>(g, scratch, share, stream)
             : operand == kTwoPasses
                 ? launch_small_kernel<kTileWords, kC, kTwoPasses, 1>(g, scratch, share, stream)
             : sixteen ? launch_small_kernel<kTileWords, kC, kPacked, 2>(g, scratch, share, stream)
                       : launch_small_kernel<kTileWords, kC, kPacked, 4>(g, scratch, share, stream);
    } else {
      constexpr Operand kPacked = Operand::kPackedHalves, kHalves = Operand::kHalves;
      return operand == kPacked
                 ? launch_small_kernel<kTileWords, kC, kPacked, 4>(g, scratch, share, stream)
             : sixteen ? launch_small_kernel<kTileWords, kC, kHalves, 2>(g, scratch, share, stream)
                       : launch_small_kernel<kTileWords, kC, kHalves, 1>(g, scratch, share, stream);
    }
  });
}

}  // namespace trellis::cuda
