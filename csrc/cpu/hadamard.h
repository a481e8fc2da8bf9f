// The 128-point Sylvester Hadamard transform in place, unnormalised. Static: every file has a copy in its
// own instruction set.
#pragma once

#include <cstring>

namespace trellis {

constexpr int kHadamard = 128;
constexpr double kInvSqrt128 = 0.08838834764831845;

template <typename T>
static inline void hadamard_128(T* v) {
  for (int stride = 1; stride < kHadamard; stride *= 2)
    for (int block = 0; block < kHadamard; block += 2 * stride)
      for (int i = block; i < block + stride; ++i) {
        const T low = v[i], high = v[i + stride];
        v[i] = low + high;
        v[i + stride] = low - high;
      }
}

// The same sums in vectors of sixteen, which compilers split into what a processor has. Where a partner
// is in the same vector, lanes are exchanged and the upper one's own value is subtracted.
static inline void hadamard_128(float* data) {
  typedef float Floats __attribute__((vector_size(64)));
  const Floats one = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
  const Floats two = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
  const Floats four = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
  const Floats eight = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};
  Floats v[8];
  std::memcpy(v, data, sizeof(v));
  for (Floats& x : v) {
    x = x * one +
        __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    x = x * two +
        __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x = x * four +
        __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = x * eight +
        __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  }
  for (int stride = 1; stride < 8; stride *= 2)
    for (int i = 0; i < 8; ++i)
      if ((i & stride) == 0) {
        const Floats low = v[i], high = v[i + stride];
        v[i] = low + high;
        v[i + stride] = low - high;
      }
  std::memcpy(data, v, sizeof(v));
}

}  // namespace trellis
