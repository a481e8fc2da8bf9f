// What the host side of every route shares: scratch, rates, launches that overlap the one in front.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <type_traits>

namespace trellis::cuda {

// Hands out pieces of one allocation; from null it only counts their bytes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}

  template <typename T>
  T* take(int64_t count) {
    T* const result = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 127) / 128 * 128;
    return result;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

// Calls f with tile_words as a compile-time constant.
template <typename F>
cudaError_t with_rate(int tile_words, F f) {
  switch (tile_words) {
    case 16:
      return f(std::integral_constant<int, 16>{});
    case 24:
      return f(std::integral_constant<int, 24>{});
    case 32:
      return f(std::integral_constant<int, 32>{});
    case 40:
      return f(std::integral_constant<int, 40>{});
    case 48:
      return f(std::integral_constant<int, 48>{});
    case 56:
      return f(std::integral_constant<int, 56>{});
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 80:
      return f(std::integral_constant<int, 80>{});
    case 96:
      return f(std::integral_constant<int, 96>{});
    case 112:
      return f(std::integral_constant<int, 112>{});
    case 128:
      return f(std::integral_constant<int, 128>{});
    default:
      return cudaErrorInvalidValue;
  }
}

// Launches clusters of `cluster` blocks that may start while the launch in front still runs.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), int64_t blocks, int threads,
                               int shared_bytes, int cluster, cudaStream_t stream,
                               Arguments... arguments) {
  // Per device and cheap; a static flag would be wrong on the second device.
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  config.attrs = attributes;
  if (major >= 9) {
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  if (cluster > 1) {
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    ++config.numAttrs;
  }
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace trellis::cuda
