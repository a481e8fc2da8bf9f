#include "codebook.h"

#include <cstdint>
#include <mutex>
#include <new>

#include "codebook_math.h"

namespace trellis {
namespace {

constexpr int kStates = 65536;

struct Table {
  std::once_flag built;
  float* values = nullptr;
};

}  // namespace

const float* codebook_values(int codebook, int bits) {
  static Table tables[kCodebooks][9];
  Table& table = tables[codebook][codebook >= kSqgE4m3 ? bits : 0];
  std::call_once(table.built, [&] {
    // Never freed: it serves until the process ends.
    float* values =
        static_cast<float*>(::operator new[](kStates * sizeof(float), std::align_val_t(64)));
    for (uint32_t s = 0; s < kStates; ++s) values[s] = value_of(codebook, bits, s);
    table.values = values;
  });
  return table.values;
}

}  // namespace trellis
