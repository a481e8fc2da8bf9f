// The host side of one rate's small kernels; included by small_k*.cu only.
#pragma once

#include <type_traits>

#include "small.cuh"

namespace trellis::cuda {

template <Operand kOperand>
constexpr std::integral_constant<Operand, kOperand> constant() {
  return {};
}

template <int kTileWords, Operand kOperand, int kRowGroups>
cudaError_t launch_small_kernel(const Gemm& g, const SmallScratch& scratch, int share,
                                cudaStream_t stream) {
  const auto kernel = small_kernel<kTileWords, kOperand, kRowGroups>;
  const int shared = SmallLayout<kTileWords>::kBytes;
  // Per device and cheap; a static flag would be wrong on the second device.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  const int64_t groups = (g.in_tiles + kSmallGroup - 1) / kSmallGroup *
                         ((g.out_tiles + kSmallTiles - 1) / kSmallTiles);
  config.gridDim = dim3(static_cast<unsigned>((groups + share - 1) / share));
  config.blockDim = dim3(kSmallWarps * 32);
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  config.stream = stream;
  cudaLaunchAttribute attribute;
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (major >= 9) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = 1;
  }
  return cudaLaunchKernelEx(&config, kernel, g, scratch, share, powers_of_two());
}

template <int kTileWords>
cudaError_t launch_small_rate(const Gemm& g, const SmallScratch& scratch, int share,
                              cudaStream_t stream) {
  const auto with = [&](auto operand, auto row_groups) {
    return launch_small_kernel<kTileWords, operand.value, row_groups.value>(g, scratch, share,
                                                                            stream);
  };
  constexpr std::integral_constant<int, 1> kOne;
  constexpr std::integral_constant<int, 2> kTwo;
  constexpr std::integral_constant<int, 4> kFour;
  const int row_groups = small_row_groups(g);
  if (g.codebook == 2) {
    if (row_groups == 4) return with(constant<Operand::kPackedMul1>(), kFour);
    if (row_groups == 2) return with(constant<Operand::kPackedMul1>(), kTwo);
    if (g.m > 4) return with(constant<Operand::kBytesTwoPasses>(), kOne);
    return with(constant<Operand::kBytes>(), kOne);
  }
  if constexpr (kTileWords % 16 == 0) {
    if (row_groups == 4) return with(constant<Operand::kPackedHalves>(), kFour);
    if (row_groups == 2) return with(constant<Operand::kPackedHalves>(), kTwo);
    return with(constant<Operand::kHalves>(), kOne);
  }
  return cudaErrorInvalidValue;  // half rates exist for mul1 only, which the bindings check
}

}  // namespace trellis::cuda
