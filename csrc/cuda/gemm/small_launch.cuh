// The host side of one rate's small kernels; included by small_k*.cu only.
#pragma once

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {

template <int kTileWords, Operand kOperand, int kRowGroups>
cudaError_t launch_small_kernel(const Gemm& g, const SmallScratch& scratch, int share,
                                cudaStream_t stream) {
  const int64_t blocks = small_stretches(g, share);
  return launch_overlapping(small_kernel<kTileWords, kOperand, kRowGroups>, blocks,
                            kSmallWarps * 32,
                            shared_for_even_spread(blocks, SmallLayout<kTileWords>::kBytes), 1,
                            stream, g, scratch, share, powers_of_two());
}

template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share,
                              cudaStream_t stream) {
  constexpr Operand kBytes = Operand::kBytes, kTwoPasses = Operand::kBytesTwoPasses,
                    kPackedMul1 = Operand::kPackedMul1, kHalves = Operand::kHalves,
                    kPackedHalves = Operand::kPackedHalves;
  const bool sixteen = small_row_groups(g) == 2;
  switch (small_operand(g)) {
    case kBytes:
      return launch_small_kernel<kTileWords, kBytes, 1>(g, scratch, share, stream);
    case kTwoPasses:
      return launch_small_kernel<kTileWords, kTwoPasses, 1>(g, scratch, share, stream);
    case kPackedMul1:
      return sixteen ? launch_small_kernel<kTileWords, kPackedMul1, 2>(g, scratch, share, stream)
                     : launch_small_kernel<kTileWords, kPackedMul1, 4>(g, scratch, share, stream);
    default:
      break;
  }
  if constexpr (kTileWords % 16 == 0) {  // half rates exist for mul1 only, which the bindings check
    if (small_operand(g) == kPackedHalves)
      return launch_small_kernel<kTileWords, kPackedHalves, 4>(g, scratch, share, stream);
    return sixteen ? launch_small_kernel<kTileWords, kHalves, 2>(g, scratch, share, stream)
                   : launch_small_kernel<kTileWords, kHalves, 1>(g, scratch, share, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
