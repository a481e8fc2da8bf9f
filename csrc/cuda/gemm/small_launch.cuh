// The host side of one rate's small kernels; included by small_k*.cu only.
#pragma once

#include "launch.cuh"
#include "small.cuh"

namespace trellis::cuda {

template <int kTileWords, Operand kOperand, int kRowGroups, bool kFused = false>
cudaError_t launch_small_kernel(const Gemm& g, const SmallScratch& scratch, int share,
                                cudaStream_t stream) {
  return launch_overlapping(small_kernel<kTileWords, kOperand, kRowGroups, kFused>,
                            small_stretches(g, share), kSmallWarps * 32,
                            static_cast<int>(small_shared_bytes(g, share, kFused)), 1, stream, g,
                            scratch, share, powers_of_two());
}

// Up to eight rows, which have a fused kernel too.
template <int kTileWords, Operand kOperand>
cudaError_t launch_small_eight(const Gemm& g, const SmallScratch& scratch, int share, bool fused,
                               cudaStream_t stream) {
  return fused ? launch_small_kernel<kTileWords, kOperand, 1, true>(g, scratch, share, stream)
               : launch_small_kernel<kTileWords, kOperand, 1>(g, scratch, share, stream);
}

template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share, bool fused,
                              cudaStream_t stream) {
  constexpr Operand kBytes = Operand::kBytes, kTwoPasses = Operand::kBytesTwoPasses,
                    kPackedMul1 = Operand::kPackedMul1, kHalves = Operand::kHalves,
                    kPackedHalves = Operand::kPackedHalves;
  const bool sixteen = small_row_groups(g) == 2;
  switch (small_operand(g)) {
    case kBytes:
      return launch_small_eight<kTileWords, kBytes>(g, scratch, share, fused, stream);
    case kTwoPasses:
      return launch_small_eight<kTileWords, kTwoPasses>(g, scratch, share, fused, stream);
    case kPackedMul1:
      return sixteen ? launch_small_kernel<kTileWords, kPackedMul1, 2>(g, scratch, share, stream)
                     : launch_small_kernel<kTileWords, kPackedMul1, 4>(g, scratch, share, stream);
    default:
      break;
  }
  if constexpr (kTileWords % 16 == 0) {  // half rates exist for mul1 only, which the bindings check
    if (small_operand(g) == kHalves && !sixteen)
      return launch_small_eight<kTileWords, kHalves>(g, scratch, share, fused, stream);
    if (small_operand(g) == kHalves)
      return launch_small_kernel<kTileWords, kHalves, 2>(g, scratch, share, stream);
    return launch_small_kernel<kTileWords, kPackedHalves, 4>(g, scratch, share, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace trellis::cuda
