// What the bindings of CUDA kernels share: torch's stream, launch errors, aligned arguments.
#pragma once

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "cuda/gemm/problem.h"

namespace trellis::cuda {

// libtorch_cuda is not linked, so that the same file loads where torch has no CUDA.
inline cudaStream_t current_stream(int32_t device) {
  using Getter = int32_t (*)(int32_t, void**);
  static const Getter getter = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        library != nullptr ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
    return reinterpret_cast<Getter>(symbol);
  }();
  STD_TORCH_CHECK(getter != nullptr, "trellis_ops: libtorch_cuda.so is not loaded");
  void* stream = nullptr;
  STD_TORCH_CHECK(getter(device, &stream) == 0, "trellis_ops: no current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

inline void check_launch(const char* op, cudaError_t error) {
  STD_TORCH_CHECK(error == cudaSuccess, op, ": CUDA launch failed: ", cudaGetErrorString(error));
}

// Kernels copy 16 bytes at a time from the packed words; a view may start anywhere.
inline torch::stable::Tensor aligned(const torch::stable::Tensor& t) {
  torch::stable::Tensor result = torch::stable::contiguous(t);
  if (reinterpret_cast<uintptr_t>(result.const_data_ptr()) % 16 != 0)
    result = torch::stable::clone(result);
  return result;
}

inline int attribute(cudaDeviceAttr name, int32_t device) {
  int value = 0;
  cudaDeviceGetAttribute(&value, name, device);
  return value;
}

inline Gpu gpu_of(int32_t device) {
  return {attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
              attribute(cudaDevAttrComputeCapabilityMinor, device),
          attribute(cudaDevAttrMultiProcessorCount, device)};
}

}  // namespace trellis::cuda
