// torch's dtypes as kernels know them.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include "cpu/numeric.h"

namespace trellis {

// Of an activation, which the checks have seen.
inline DType dtype_of(torch::headeronly::ScalarType dtype) {
  switch (dtype) {
    case torch::headeronly::ScalarType::Half:
      return DType::Half;
    case torch::headeronly::ScalarType::BFloat16:
      return DType::BFloat16;
    default:
      return DType::Float;
  }
}

}  // namespace trellis
