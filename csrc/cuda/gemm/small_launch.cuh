// The host side of one rate's small kernels; included by small_k*.cu only.
#pragma once

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {

template <int kTileWords, Operand kOperand, int kRowGroups>
cudaError_t launch_small_kernel(const Gemm& g, const SmallScratch& scratch, int share,
                                cudaStream_t stream) {
  return launch_overlapping(small_kernel<kTileWords, kOperand, kRowGroups>,
                            small_stretches(g, share), kSmallWarps * 32,
                            SmallLayout<kTileWords>::kBytes, 1, stream, g, scratch, share,
                            powers_of_two());
}

template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share,
                              cudaStream_t stream) {
  const Operand operand = small_operand(g);
  const bool sixteen = small_row_groups(g) == 2;
  if (operand == Operand::kPackedMul1) {
    return sixteen
               ? launch_small_kernel<kTileWords, Operand::kPackedMul1, 2>(g, scratch, share, stream)
               : launch_small_kernel<kTileWords, Operand::kPackedMul1, 4>(g, scratch, share,
                                                                          stream);
  }
  if (operand == Operand::kBytes)
    return launch_small_kernel<kTileWords, Operand::kBytes, 1>(g, scratch, share, stream);
  if (operand == Operand::kBytesTwoPasses)
    return launch_small_kernel<kTileWords, Operand::kBytesTwoPasses, 1>(g, scratch, share, stream);
  if constexpr (kTileWords % 16 == 0) {  // half rates exist for mul1 only, which the bindings check
    if (operand == Operand::kHalves)
      return launch_small_kernel<kTileWords, Operand::kHalves, 1>(g, scratch, share, stream);
    return sixteen ? launch_small_kernel<kTileWords, Operand::kPackedHalves, 2>(g, scratch, share,
                                                                                stream)
                   : launch_small_kernel<kTileWords, Operand::kPackedHalves, 4>(g, scratch, share,
                                                                                stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
