// The 128-point Sylvester Hadamard transform in place, unnormalised.
#pragma once

namespace trellis {

constexpr int kHadamard = 128;
constexpr double kInvSqrt128 = 0.08838834764831845;

template <typename T>
inline void hadamard_128(T* v) {
  for (int stride = 1; stride < kHadamard; stride *= 2)
    for (int block = 0; block < kHadamard; block += 2 * stride)
      for (int i = block; i < block + stride; ++i) {
        const T low = v[i], high = v[i + stride];
        v[i] = low + high;
        v[i + stride] = low - high;
      }
}

}  // namespace trellis
