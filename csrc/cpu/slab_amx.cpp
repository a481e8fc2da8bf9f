// The GEMM on processors with a matrix unit for bytes (AMX-INT8), beside AVX-512 with FP16 arithmetic.
//
// Weights and activations become 16-bit integers, finer ones than those of slab_integer.h, and are cut into
// an upper and a lower byte. Three products of bytes find what counts of their product; the fourth, of both
// lower bytes, is left out. It is 7e-5 of the whole: an activation's lower byte is signed, so that it is zero
// on average, and of a weight's, which is not signed, the average is made up for. It is more where one
// activation of a row is far larger than all others, and such rows get it after all.
//
// The unit adds up the products of 512 inputs before its sums are taken, and so long have the activations
// one scale.
#ifdef TRELLIS_X86
#include "slab_fp16_avx512.h"

namespace trellis {
namespace {

constexpr int kSteps = 8;           // of a panel
constexpr int kPanel = 4 * kSteps;  // tiles, one above the other, that share a scale: 512 inputs
constexpr float kLargestInput = 32512;  // the largest integer whose lower byte is zero
// Of the lower bytes in all of an activation, as root mean squares, up to which their product is left out:
// 3e-4 of the result for the worst codebook, whereas of normally distributed activations it is 0.008.
constexpr float kMostLower = 0.025f;

inline int64_t panels_of(const Matrix& w) { return (w.in_tiles + kPanel - 1) / kPanel; }

// Bytes of four tiles, 64 inputs, of sixteen columns or rows, in an order of inputs that weights and
// activations share: one step of the matrix unit.
struct alignas(64) Step {
  int8_t upper[16][64], lower[16][64];
};

// The activations of sixteen rows in one panel, transposed: 4 inputs, 16 rows, 4 inputs, ...
struct alignas(64) RowTile {
  Step steps[kSteps];
  // Of the integers; the sums of their lower bytes, in the inputs' unit; what the product of lower bytes is
  // worth, as zero where it is left out.
  float scales[16], lows[16], lower_scales[16];
};

// The lower byte of a weight's integer, on average over a codebook's states: E4M3 values are coarse.
constexpr float kLows[kCodebooks] = {124.0f, 124.4f, 125.7f, 22.4f, 125.3f};

// A weight is an integer times kScale.
struct Weights : Fp16 {
  template <int kCodebook>
  struct TwoHalves {
    static constexpr float kScale = 0x1p-13f;

    static __m512i value(__m512i states) {
      const __m512h sum = Fp16::TwoHalves<kCodebook>::sum(states);
      return _mm512_cvtph_epi16(_mm512_add_ph(sum, sum));
    }
  };

  struct ByteSum {
    static constexpr float kScale = 0x1p-13f;

    static __m512i value(__m512i states) {
      return _mm512_cvtph_epi16(rounded<13>(Fp16::ByteSum{}.value(states)));
    }
  };

  struct Lookup : LookupRange {
    static constexpr float kScale = LookupRange::kScale / 4;
    const float* values;

    __m512i value(__m512i states) const {
      return _mm512_slli_epi16(Fp16::Lookup{{}, values}.value(states), 2);
    }
  };
};

// The bytes of one strip of four tiles: for each plane, column c and column c + 8.
struct StripBytes {
  __m512i upper[2], lower[2];
};

inline StripBytes bytes_of(__m512i a, __m512i b, __m512i c, __m512i d) {
  constexpr __mmask64 kOdd = 0xAAAAAAAAAAAAAAAA;
  const auto upper = [](__m512i x, __m512i y) {
    return _mm512_mask_blend_epi8(kOdd, _mm512_srli_epi16(x, 8), y);
  };
  const auto lower = [](__m512i x, __m512i y) {
    return _mm512_mask_blend_epi8(kOdd, x, _mm512_slli_epi16(y, 8));
  };
  const __m512i u = upper(a, b), v = upper(c, d), m = lower(a, b), n = lower(c, d);
  return {{_mm512_unpacklo_epi64(u, v), _mm512_unpackhi_epi64(u, v)},
          {_mm512_unpacklo_epi64(m, n), _mm512_unpackhi_epi64(m, n)}};
}

// Where a column's bytes out of bytes_of have their inputs, in bytes packed lane by lane from four vectors
// of sixteen inputs.
struct InputOrder {
  alignas(64) uint8_t inputs[64];

  constexpr InputOrder() : inputs() {
    for (int i = 0; i < 64; ++i) {
      const int tile = (i >> 3 & 1) * 2 + (i & 1);
      const int input = input_of((i >> 4) * 8 + (i >> 1 & 3));
      inputs[i] = static_cast<uint8_t>(input / 4 * 16 + tile * 4 + input % 4);
    }
  }
};

// Columns become rows.
inline void transpose(__m512 (&v)[16]) {
  // Fours of lanes first, then the fours themselves.
  for (int i = 0; i < 16; i += 4) {
    const __m512 a = _mm512_unpacklo_ps(v[i], v[i + 1]), b = _mm512_unpackhi_ps(v[i], v[i + 1]);
    const __m512 c = _mm512_unpacklo_ps(v[i + 2], v[i + 3]),
                 d = _mm512_unpackhi_ps(v[i + 2], v[i + 3]);
    v[i] = _mm512_shuffle_ps(a, c, 0x44);
    v[i + 1] = _mm512_shuffle_ps(a, c, 0xEE);
    v[i + 2] = _mm512_shuffle_ps(b, d, 0x44);
    v[i + 3] = _mm512_shuffle_ps(b, d, 0xEE);
  }
  for (int i = 0; i < 4; ++i) {
    const __m512 a = _mm512_shuffle_f32x4(v[i], v[i + 4], 0x88),
                 b = _mm512_shuffle_f32x4(v[i], v[i + 4], 0xDD);
    const __m512 c = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0x88),
                 d = _mm512_shuffle_f32x4(v[i + 8], v[i + 12], 0xDD);
    v[i] = _mm512_shuffle_f32x4(a, c, 0x88);
    v[i + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
    v[i + 8] = _mm512_shuffle_f32x4(a, c, 0xDD);
    v[i + 12] = _mm512_shuffle_f32x4(b, d, 0xDD);
  }
}

// Compilers do not see what the tile instructions read and write in memory.
inline void all_of_memory(const void* used) { asm volatile("" : : "r"(used) : "memory"); }

// The tiles' shapes, for as long as it lives; what was configured before, by whomever, comes back.
class TileShapes {
 public:
  TileShapes() {
    _tile_storeconfig(&before_);
    all_of_memory(&before_);
    Shapes shapes;
    for (int i = 0; i < 8; ++i) {
      shapes.bytes[i] = 64;
      shapes.rows[i] = 16;
    }
    shapes.palette = 1;
    all_of_memory(&shapes);
    _tile_loadconfig(&shapes);
  }
  ~TileShapes() {
    if (before_.palette == 0)
      _tile_release();
    else
      _tile_loadconfig(&before_);
  }
  TileShapes(const TileShapes&) = delete;
  TileShapes& operator=(const TileShapes&) = delete;

 private:
  struct alignas(64) Shapes {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};
  };
  Shapes before_;
};

struct Amx {
  using Few = Slab<Fp16>;
  static constexpr int kRowBlock = 512, kColumnBlocks = 2;
  static constexpr int kFewRows = 8;  // leave the matrix unit too empty

  static int64_t row_tiles(int rows) { return (rows + 15) / 16; }
  static int columns_of(int tiles) {
    return (tiles + 1) / 2 * 32;
  }  // which meet rows in pairs of tiles

  static int64_t prepared_bytes(const Matrix& w, int rows) {
    if (rows <= kFewRows) return Few::prepared_bytes(w, rows);
    return row_tiles(rows) * panels_of(w) * static_cast<int64_t>(sizeof(RowTile));
  }

  static void prepare(const Matrix& w, const float* x, int row, int rows, void* prepared) {
    if (rows <= kFewRows) return Few::prepare(w, x, row, rows, prepared);
    RowTile* tile = static_cast<RowTile*>(prepared) + row / 16;
    for (int64_t in_tile = 0; in_tile < w.in_tiles; in_tile += kPanel, tile += row_tiles(rows)) {
      const int depth = static_cast<int>(std::min<int64_t>(kPanel, w.in_tiles - in_tile));
      quantise(x + in_tile * 16, depth, row % 16, *tile);
      if (row + 1 < rows) continue;
      for (int empty = row % 16 + 1; empty < 16; ++empty) quantise(nullptr, 0, empty, *tile);
    }
  }

  // One row's inputs of `depth` tiles.
  static void quantise(const float* x, int depth, int row, RowTile& to) {
    const __m512i places =
        _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    float largest, magnitude;
    Fp16::magnitudes(x, depth, &largest, &magnitude);
    const bool finite = magnitude <= 3e38f;
    float factor = 1.0f;
    if (finite && largest > 0) factor = std::min(kLargestInput / largest, 0x1p120f);
    if (!finite) depth = 0;
    __m512i lows = _mm512_setzero_si512(), lower_squares = _mm512_setzero_si512();
    __m512 squares = _mm512_setzero_ps();
    static constexpr InputOrder kOrder;
    const __m512i order = _mm512_load_si512(kOrder.inputs);
    for (int s = 0; s < kSteps; ++s) {
      const auto rounded = [&](int i) {
        if (4 * s + i >= depth) return _mm512_setzero_si512();
        const __m512 inputs =
            _mm512_mul_ps(_mm512_loadu_ps(x + (4 * s + i) * 16), _mm512_set1_ps(factor));
        squares = _mm512_fmadd_ps(inputs, inputs, squares);
        return _mm512_cvtps_epi32(inputs);
      };
      const __m512i a = _mm512_packs_epi32(rounded(0), rounded(1)),
                    b = _mm512_packs_epi32(rounded(2), rounded(3));
      const auto upper_of = [](__m512i words) {  // the nearest multiple of 256
        return _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
      };
      const auto lower_of = [](__m512i words) {
        return _mm512_and_si512(words, _mm512_set1_epi16(255));
      };
      const __m512i upper =
          _mm512_permutexvar_epi8(order, _mm512_packs_epi16(upper_of(a), upper_of(b)));
      const __m512i lower =
          _mm512_permutexvar_epi8(order, _mm512_packus_epi16(lower_of(a), lower_of(b)));
      lows = _mm512_dpbusd_epi32(lows, _mm512_set1_epi8(1), lower);
      for (const __m512i words : {a, b}) {
        const __m512i rest = _mm512_sub_epi16(words, _mm512_slli_epi16(upper_of(words), 8));
        lower_squares = _mm512_dpwssd_epi32(lower_squares, rest, rest);
      }
      _mm512_i32scatter_epi32(to.steps[s].upper[0] + 4 * row, places, upper, 4);
      _mm512_i32scatter_epi32(to.steps[s].lower[0] + 4 * row, places, lower, 4);
    }
    // One value that is not finite makes every result NaN.
    const float scale = finite ? 1.0f / factor : magnitude - magnitude;
    const float most = kMostLower * kMostLower * _mm512_reduce_add_ps(squares);
    const bool counts = static_cast<float>(_mm512_reduce_add_epi32(lower_squares)) > most;
    to.scales[row] = scale;
    to.lows[row] = counts ? 0 : static_cast<float>(_mm512_reduce_add_epi32(lows)) * scale;
    to.lower_scales[row] = counts ? scale / 256 : 0;
  }

  // Steps of one output tile: [column][64 inputs].
  template <int kWords, typename Codebook, int... kStripIndex>
  static void decode(const int16_t* packed, int64_t stride, int depth, const Codebook& codebook,
                     Step* steps, std::integer_sequence<int, kStripIndex...>) {
    for (int s = 0; 4 * s < depth; ++s) {
      const int16_t* tiles[4];
      for (int i = 0; i < 4; ++i) {
        // Where there is no tile any other will do: the activations are zero.
        tiles[i] = packed + std::min(4 * s + i, depth - 1) * stride;
        prefetch<kWords>(tiles[i], stride);
      }
      const auto strip = [&](auto index) {
        constexpr int c = decltype(index)::value;
        const auto words = [&](int i) { return codebook.value(Fp16::states<kWords, c>(tiles[i])); };
        const StripBytes bytes = bytes_of(words(0), words(1), words(2), words(3));
        for (int h = 0; h < 2; ++h) {
          _mm512_store_si512(steps[s].upper[c + 8 * h], bytes.upper[h]);
          _mm512_store_si512(steps[s].lower[c + 8 * h], bytes.lower[h]);
        }
      };
      (strip(std::integral_constant<int, kStripIndex>{}), ...);
      // Left alone for half a microsecond the unit falls asleep, and takes as long again to wake. What
      // this multiplies and adds nobody reads.
      _tile_dpbssd(0, 6, 7);
    }
  }

  // Sums of sixteen columns and sixteen rows, of two output tiles; what they are worth, and where they go.
  struct Found {
    alignas(64) int32_t high[2][16][16], middle[2][16][16];
    const float* scales;
    float* sums;
  };

  // sums[column][row] += scale * (256 * high + middle), for one column of two output tiles.
  static void add(const Found& found, int column, __m512 scales) {
    const auto at = [&](const int32_t (&part)[2][16][16]) {
      return _mm512_cvtepi32_ps(_mm512_load_si512(part[column / 16][column % 16]));
    };
    const __m512 sum = _mm512_fmadd_ps(at(found.high), _mm512_set1_ps(256), at(found.middle));
    float* const to = found.sums + column * 16;
    _mm512_store_ps(to, _mm512_fmadd_ps(sum, scales, _mm512_load_ps(to)));
  }

  // Two output tiles meet one tile of rows. Between the unit's products, which take sixteen cycles each,
  // vectors add what it found before.
  static void meet(const Step (&weights)[2][kSteps], const RowTile& rows, int steps,
                   const Found& before, Found& found) {
    const __m512 scales = _mm512_load_ps(before.scales);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < kSteps; ++s) {
      if (s < steps) {
        const Step &first = weights[0][s], &second = weights[1][s], &x = rows.steps[s];
        _tile_loadd(4, x.upper, 64);
        _tile_loadd(5, first.upper, 64);
        _tile_dpbssd(0, 5, 4);
        _tile_loadd(6, second.upper, 64);
        _tile_dpbssd(2, 6, 4);
        _tile_loadd(7, x.lower, 64);
        _tile_dpbssd(1, 5, 7);
        _tile_dpbssd(3, 6, 7);
        _tile_loadd(5, first.lower, 64);
        _tile_dpbusd(1, 5, 4);
        _tile_loadd(6, second.lower, 64);
        _tile_dpbusd(3, 6, 4);
      }
      for (int c = 0; c < 4; ++c) add(before, 4 * s + c, scales);
    }
    _tile_stored(0, found.high[0], 64);
    _tile_stored(1, found.middle[0], 64);
    _tile_stored(2, found.high[1], 64);
    _tile_stored(3, found.middle[1], 64);
  }

  // The product of lower bytes, for those rows of the tile that need it; nothing is added to others.
  static void meet_lower(const Step (&weights)[2][kSteps], const RowTile& rows, int steps,
                         float* sums) {
    const __m512 scales = _mm512_load_ps(rows.lower_scales);
    if (_mm512_cmp_ps_mask(scales, _mm512_setzero_ps(), _CMP_NEQ_UQ) == 0) return;
    _tile_zero(0);
    _tile_zero(1);
    for (int s = 0; s < steps; ++s) {
      _tile_loadd(4, rows.steps[s].lower, 64);
      _tile_loadd(5, weights[0][s].lower, 64);
      _tile_dpbusd(0, 5, 4);
      _tile_loadd(6, weights[1][s].lower, 64);
      _tile_dpbusd(1, 6, 4);
    }
    alignas(64) int32_t found[32][16];
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[16], 64);
    for (int c = 0; c < 32; ++c, sums += 16) {
      const __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(found[c]));
      _mm512_store_ps(sums, _mm512_fmadd_ps(sum, scales, _mm512_load_ps(sums)));
    }
  }

  // The unit's sums are added a turn later: what it reads or writes is then out of the way of stores and
  // loads.
  template <int kWords, typename Codebook>
  static void accumulate(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                         const RowTile* inputs, int rows, float* sums) {
    Step weights[2][kSteps];
    const int64_t stride = w.out_tiles * kWords, count = row_tiles(rows);
    Found found[2] = {};
    found[1].scales = inputs->scales;  // nothing was found yet: zeros
    found[1].sums = sums;
    int turn = 0;
    for (int64_t in_tile = 0; in_tile < w.in_tiles; in_tile += kPanel, inputs += count) {
      const int depth = static_cast<int>(std::min<int64_t>(kPanel, w.in_tiles - in_tile));
      for (int t = 0; t < tiles; t += 2) {
        // Where there is no second tile any other will do: nobody takes its sums.
        for (int i = 0; i < 2; ++i)
          decode<kWords>(
              w.trellis + in_tile * stride + (out_tile + std::min(t + i, tiles - 1)) * kWords,
              stride, depth, codebook, weights[i], std::make_integer_sequence<int, kStrips>{});
        all_of_memory(weights);
        for (int64_t tile = 0; tile < count; ++tile, turn ^= 1) {
          meet(weights, inputs[tile], (depth + 3) / 4, found[turn ^ 1], found[turn]);
          found[turn].scales = inputs[tile].scales;
          found[turn].sums = sums + (tile * columns_of(tiles) + t * 16) * 16;
          meet_lower(weights, inputs[tile], (depth + 3) / 4, found[turn].sums);
        }
      }
    }
    const Found& last = found[turn ^ 1];
    for (int c = 0; c < 32; ++c) add(last, c, _mm512_load_ps(last.scales));
  }

  static void multiply(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                       const Take& take) {
    if (rows <= kFewRows) {
      for (int t = 0; t < tiles; t += 8)
        Few::multiply(w, out_tile + t, std::min(8, tiles - t), prepared, rows,
                      [&](int, int row, int count, float* sums) { take(t, row, count, sums); });
      return;
    }
    const int columns = columns_of(tiles);
    const TileShapes shapes;
    alignas(64) static thread_local float transposed[kRowBlock * kColumnBlocks * kSlabColumns];
    std::memset(transposed, 0, sizeof(float) * row_tiles(rows) * 16 * columns);
    const RowTile* const inputs = static_cast<const RowTile*>(prepared);
    with_codebook<Weights>(w, [&](const auto& codebook) {
      using Codebook = std::decay_t<decltype(codebook)>;
      with_rate(w.tile_words, [&](auto words) {
        accumulate<words.value>(w, codebook, out_tile, tiles, inputs, rows, transposed);
      });
      const int64_t count = row_tiles(rows);
      for (int64_t tile = 0; tile < count; ++tile) {
        __m512 offsets = _mm512_setzero_ps();
        for (int64_t panel = 0; panel < panels_of(w); ++panel) {
          const __m512 lows = _mm512_load_ps(inputs[panel * count + tile].lows);
          offsets = _mm512_fmadd_ps(lows, _mm512_set1_ps(kLows[w.codebook]), offsets);
        }
        alignas(64) float part[16 * kSlabColumns];
        for (int t = 0; t < tiles; ++t) {
          const float* const from = transposed + (tile * columns + t * 16) * 16;
          __m512 values[16];
          for (int c = 0; c < 16; ++c)
            values[c] = _mm512_mul_ps(
                _mm512_fmadd_ps(_mm512_load_ps(from + c * 16), _mm512_set1_ps(256), offsets),
                _mm512_set1_ps(Codebook::kScale));
          transpose(values);
          for (int r = 0; r < 16; ++r)
            _mm512_store_ps(part + r * kSlabColumns + t % 8 * 16, values[r]);
          if (t % 8 == 7 || t + 1 == tiles)
            take(t / 8 * 8, static_cast<int>(tile) * 16,
                 std::min(16, rows - static_cast<int>(tile) * 16), part);
        }
      }
    });
  }
};

}  // namespace

const SlabKernels& amx_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Amx>("amx");
  return kernels;
}

const SlabKernels& exact_amx_slab_kernels() {
  static const SlabKernels kernels = [] {
    SlabKernels same = amx_slab_kernels();
    same.product = [](const Matrix& w, int64_t out_tile, int tiles, const float* x,
                      int64_t x_stride, int rows, float* sums) {
      const bool few = rows <= Amx::kFewRows;
      (few ? exact_avx512fp16_slab_kernels() : amx_slab_kernels())
          .product(w, out_tile, tiles, x, x_stride, rows, sums);
    };
    return same;
  }();
  return kernels;
}

}  // namespace trellis
#endif
