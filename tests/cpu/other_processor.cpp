// Runs every kernel of the GEMM that the processor has, on every codebook and rate, without torch: for
// processors that are only emulated where the tests run. test_neon.py compiles it with csrc/cpu.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "../../csrc/cpu/codebook.h"
#include "../../csrc/cpu/isa.h"
#include "../../csrc/cpu/layer.h"
#include "../../csrc/parallel.h"

namespace trellis {
void parallel_for(int64_t count, int64_t, const std::function<void(int64_t, int64_t)>& body) {
  if (count > 0) body(0, count);
}
int thread_count() { return 1; }
}  // namespace trellis

namespace {

constexpr int kIn = 384, kOut = 256, kRows = 5;

struct Layer {
  std::vector<int16_t> trellis;
  std::vector<uint16_t> suh, svh;
  std::vector<float> x;
  trellis::Matrix w;

  Layer(int codebook, int tile_words, std::mt19937& random)
      : trellis(kIn / 16 * kOut / 16 * tile_words), suh(kIn), svh(kOut), x(kRows * kIn) {
    std::normal_distribution<float> normal;
    for (auto& word : trellis) word = static_cast<int16_t>(random());
    for (auto& value : suh) value = trellis::half_from_float(normal(random));
    for (auto& value : svh) value = trellis::half_from_float(normal(random) * 0.05f);
    for (auto& value : x) value = normal(random);
    w = {trellis.data(), kIn / 16,  kOut / 16,
         tile_words,     codebook,  trellis::codebook_values(codebook, tile_words / 16),
         suh.data(),     svh.data()};
  }

  std::vector<float> run(const trellis::SlabKernels& kernels, int rows) {
    std::vector<float> scratch(trellis::gemm_scratch_floats(kernels, w, rows));
    std::vector<float> y(rows * kOut);
    trellis::gemm(kernels, w, {x.data(), trellis::DType::Float, rows, kIn}, nullptr,
                  trellis::DType::Float, scratch.data(), y.data(), trellis::DType::Float, kOut);
    return y;
  }
};

// The layer in double, from the codebook's table and a dense matrix that the library decodes itself.
double error(Layer& layer, const std::vector<float>& y) {
  std::vector<float> dense(kIn * kOut);
  trellis::dequantize(layer.w, dense.data(), trellis::DType::Float);
  double wrong = 0, size = 0;
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kOut; ++c) {
      double want = 0;
      for (int k = 0; k < kIn; ++k)
        want += static_cast<double>(layer.x[r * kIn + k]) * dense[k * kOut + c];
      wrong += (y[r * kOut + c] - want) * (y[r * kOut + c] - want);
      size += want * want;
    }
  }
  return std::sqrt(wrong / size);
}

}  // namespace

int main() {
  std::mt19937 random(1);
  const int words[] = {16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128};
  int failures = 0;
  for (int isa = 0; isa < 63; ++isa) {
    if ((trellis::available_isas() >> isa & 1) == 0) continue;
    const auto& kernels = trellis::slab_kernels(static_cast<trellis::Isa>(isa));
    double worst = 0;
    bool same = true;
    for (int codebook = 0; codebook < trellis::kCodebooks; ++codebook) {
      for (int tile_words : words) {
        if (tile_words % 16 != 0 && codebook != trellis::kMul1) continue;
        if (codebook >= trellis::kSqgE4m3 && (tile_words < 80 || tile_words > 96)) continue;
        Layer layer(codebook, tile_words, random);
        const std::vector<float> all = layer.run(kernels, kRows), first = layer.run(kernels, 1);
        worst = std::fmax(worst, error(layer, all));
        same = same && std::memcmp(all.data(), first.data(), sizeof(float) * kOut) == 0;
      }
    }
    std::printf("%s: relative error %.2e, rows %s\n", kernels.name, worst,
                same ? "independent" : "DEPEND on their number");
    failures += !(worst <= 5e-4) || !same;
  }
  return failures;
}
