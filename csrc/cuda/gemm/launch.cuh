// What the host side of every route shares: scratch, and launches that overlap the one in front.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "../../rates.h"

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

// Of the current device. Cheap; a static value would be wrong on the second device.
inline int attribute(cudaDeviceAttr which) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, which, device);
  return value;
}

// Shared memory that each of `blocks` asks for, at least `needed`. Where a multiprocessor has room for more
// blocks than its even share, some would get more and others none: so no more than that fit.
inline int shared_for_even_spread(int64_t blocks, int needed) {
  const int sm_count = attribute(cudaDevAttrMultiProcessorCount);
  const int64_t rounds = (blocks + sm_count - 1) / sm_count;
  const int of_all = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  const int reserved = attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  return std::max(needed, static_cast<int>((of_all / rounds - reserved) / 128 * 128));
}

// For a kernel that needs little shared memory in front of one that needs much: a multiprocessor that divides
// its memory otherwise between shared memory and cache cannot take a block of the second while one of the
// first runs, and others would get all of them.
template <typename Kernel>
cudaError_t prefer_shared(Kernel kernel) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
}

// Launches clusters of `cluster` blocks that may start while the launch in front still runs.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapping_grid(void (*kernel)(Parameters...), dim3 blocks, int threads,
                                    int shared_bytes, int cluster, cudaStream_t stream,
                                    Arguments... arguments) {
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (attribute(cudaDevAttrComputeCapabilityMajor) >= 9) {
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

template <typename... Parameters, typename... Arguments>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), int64_t blocks, int threads,
                               int shared_bytes, int cluster, cudaStream_t stream,
                               Arguments... arguments) {
  return launch_overlapping_grid(kernel, dim3(static_cast<unsigned>(blocks)), threads, shared_bytes,
                                 cluster, stream, arguments...);
}

}  // namespace trellis::cuda
