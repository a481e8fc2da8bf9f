// The GEMM on processors with a matrix unit for bytes (AMX-INT8), beside AVX-512 with FP16 arithmetic.
//
// The integers of slab_integer.h, weights and activations, are cut into an upper and a lower byte; four
// products of bytes give the same exact sums of 128 products, so a row has the same bits here as where few
// rows make vectors the better choice.
#ifdef TRELLIS_X86
#include "slab_fp16_avx512.h"

namespace trellis {
namespace {

// How far a codebook's integers are shifted up before they are cut, as far as sixteen bits allow.
template <typename Codebook>
constexpr int shift_of() {
  int shift = 0;
  while (Codebook::kLargest * (2 << shift) <= 32768) ++shift;
  return shift;
}

// Four tiles, 64 inputs, at a time: one step of the matrix unit.
constexpr int kSteps = kDepth / 4;

// Bytes of one step, sixteen columns or rows of 64 inputs each, in an order of inputs that weights and
// activations share.
struct alignas(64) Step {
  int8_t upper[16][64], lower[16][64];
};

// The activations of sixteen rows in one block of inputs, transposed: 4 inputs, 16 rows, 4 inputs, ...
struct alignas(64) RowTile {
  Step steps[kSteps];
  float scales[16], totals[16];
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
  static constexpr int kRowBlock = kMostRows;
  static constexpr int kFewRows = 8;  // leave the matrix unit too empty

  static int64_t row_tiles(int rows) { return (rows + 15) / 16; }

  static int64_t prepared_bytes(const Matrix& w, int rows) {
    if (rows <= kFewRows) return Few::prepared_bytes(w, rows);
    return row_tiles(rows) * input_blocks(w) * static_cast<int64_t>(sizeof(RowTile));
  }

  static void prepare(const Matrix& w, const float* x, int row, int rows, void* prepared) {
    if (rows <= kFewRows) return Few::prepare(w, x, row, rows, prepared);
    RowTile* const tiles = static_cast<RowTile*>(prepared) + row / 16;
    quantise_row<Fp16>(w, x, [&](int64_t block, const Inputs& inputs) {
      put(inputs, row % 16, tiles[block * row_tiles(rows)]);
    });
    if (row + 1 < rows) return;
    const Inputs inputs = {};  // the last tile may have room for more rows
    for (int empty = rows % 16; empty % 16 != 0; ++empty)
      for (int64_t block = 0; block < input_blocks(w); ++block)
        put(inputs, empty, tiles[block * row_tiles(rows)]);
  }

  static void put(const Inputs& inputs, int row, RowTile& to) {
    const __m512i places =
        _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
    to.scales[row] = inputs.scale;
    to.totals[row] = inputs.total;
    for (int s = 0; s < kSteps; ++s) {
      const int16_t (*const words)[kStrip] = inputs.words + 4 * s;
      const StripBytes bytes = bytes_of(Fp16::load(words[0]), Fp16::load(words[1]),
                                        Fp16::load(words[2]), Fp16::load(words[3]));
      _mm512_i32scatter_epi32(to.steps[s].upper[0] + 4 * row, places, bytes.upper[0], 4);
      _mm512_i32scatter_epi32(to.steps[s].lower[0] + 4 * row, places, bytes.lower[0], 4);
    }
  }

  // Steps of one output tile: [column][64 inputs].
  template <int kWords, typename Codebook, int... kStripIndex>
  static void decode(const int16_t* packed, int64_t stride, int depth, const Codebook& codebook,
                     Step* steps, std::integer_sequence<int, kStripIndex...>) {
    for (int s = 0; s < kSteps; ++s) {
      const int16_t* tiles[4];
      for (int i = 0; i < 4; ++i) {
        // Where there is no tile any other will do: the activations are zero.
        tiles[i] = packed + std::min(4 * s + i, depth - 1) * stride;
        prefetch<kWords>(tiles[i], stride);
      }
      const auto strip = [&](auto index) {
        constexpr int c = decltype(index)::value;
        const auto words = [&](int i) {
          return _mm512_slli_epi16(codebook.value(Fp16::states<kWords, c>(tiles[i])),
                                   shift_of<Codebook>());
        };
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

  // Exact sums of sixteen columns and sixteen rows, in three parts; two output tiles.
  struct alignas(64) Parts {
    int32_t highest[16][16], middle[16][16], lowest[16][16];
  };

  // sums[column][row] += scale * parts, for two of the columns of two output tiles.
  template <int kShift, int kColumn>
  static void add(const Parts (&parts)[2], __m512 scales, float* sums) {
    for (int c = kColumn; c < kColumn + 2; ++c) {
      const Parts& part = parts[c / 16];
      const __m512i high = _mm512_slli_epi32(_mm512_load_si512(part.highest[c % 16]), 16 - kShift);
      const __m512i mid = _mm512_slli_epi32(_mm512_load_si512(part.middle[c % 16]), 8 - kShift);
      const __m512i low = _mm512_srli_epi32(_mm512_load_si512(part.lowest[c % 16]), kShift);
      const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(high, mid), low);
      _mm512_store_ps(sums + c * 16, _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scales,
                                                     _mm512_load_ps(sums + c * 16)));
    }
  }

  // Sums that the unit found and that are still to be added.
  struct Found {
    Parts parts[2];
    const float* scales;
    float* sums;
  };

  // One step of two output tiles that meet one tile of rows, whose bytes are loaded once. Between the
  // unit's products, which take sixteen cycles each, vectors add what it found before.
  template <int kShift, int kStep>
  static void meet(const Step& first, const Step& second, const Step& rows, const Found& before) {
    constexpr int kColumn = kStep * 16;
    const __m512 scales = _mm512_load_ps(before.scales);
    float* const sums = before.sums;
    _tile_loadd(6, rows.upper, 64);
    _tile_loadd(7, first.upper, 64);
    _tile_dpbssd(0, 7, 6);
    add<kShift, kColumn>(before.parts, scales, sums);
    _tile_loadd(7, first.lower, 64);
    _tile_dpbusd(1, 7, 6);
    add<kShift, kColumn + 2>(before.parts, scales, sums);
    _tile_loadd(7, second.upper, 64);
    _tile_dpbssd(3, 7, 6);
    add<kShift, kColumn + 4>(before.parts, scales, sums);
    _tile_loadd(7, second.lower, 64);
    _tile_dpbusd(4, 7, 6);
    add<kShift, kColumn + 6>(before.parts, scales, sums);
    _tile_loadd(6, rows.lower, 64);
    _tile_dpbuud(5, 7, 6);
    add<kShift, kColumn + 8>(before.parts, scales, sums);
    _tile_loadd(7, first.upper, 64);
    _tile_dpbsud(1, 7, 6);
    add<kShift, kColumn + 10>(before.parts, scales, sums);
    _tile_loadd(7, second.upper, 64);
    _tile_dpbsud(4, 7, 6);
    add<kShift, kColumn + 12>(before.parts, scales, sums);
    _tile_loadd(7, first.lower, 64);
    _tile_dpbuud(2, 7, 6);
    add<kShift, kColumn + 14>(before.parts, scales, sums);
  }

  template <int kShift>
  static void meet(const Step (&weights)[2][kSteps], const RowTile& rows, const Found& before,
                   Found& found) {
    static_assert(kSteps == 2);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    meet<kShift, 0>(weights[0][0], weights[1][0], rows.steps[0], before);
    meet<kShift, 1>(weights[0][1], weights[1][1], rows.steps[1], before);
    _tile_stored(0, found.parts[0].highest, 64);
    _tile_stored(1, found.parts[0].middle, 64);
    _tile_stored(2, found.parts[0].lowest, 64);
    _tile_stored(3, found.parts[1].highest, 64);
    _tile_stored(4, found.parts[1].middle, 64);
    _tile_stored(5, found.parts[1].lowest, 64);
  }

  template <int kShift, int... kPair>
  static void add_all(const Found& found, std::integer_sequence<int, kPair...>) {
    const __m512 scales = _mm512_load_ps(found.scales);
    (add<kShift, 2 * kPair>(found.parts, scales, found.sums), ...);
  }

  // The unit works on one pair of output tiles while the vectors decode the next, and its sums are added
  // a step later: what it reads or writes is then out of the way of stores and loads.
  template <int kWords, typename Codebook>
  static void accumulate(const Matrix& w, const Codebook& codebook, int64_t out_tile, int tiles,
                         const RowTile* inputs, int rows, float* sums) {
    constexpr int kShift = shift_of<Codebook>();
    Step weights[2][2][kSteps];
    const int64_t stride = w.out_tiles * kWords, count = row_tiles(rows);
    const int64_t pairs = (tiles + 1) / 2, items = input_blocks(w) * pairs;
    const auto decode_item = [&](int64_t item) {
      const int64_t in_tile = item / pairs * kDepth, t = item % pairs * 2;
      const int depth = static_cast<int>(std::min<int64_t>(kDepth, w.in_tiles - in_tile));
      // Where there is no second tile any other will do: nobody takes its sums.
      for (int i = 0; i < 2; ++i)
        decode<kWords>(w.trellis + in_tile * stride +
                           (out_tile + std::min<int64_t>(t + i, tiles - 1)) * kWords,
                       stride, depth, codebook, weights[item % 2][i],
                       std::make_integer_sequence<int, kStrips>{});
      all_of_memory(weights);
    };
    Found found[2] = {};
    found[1].scales = inputs->scales;  // nothing was found yet: zeros
    found[1].sums = sums;
    int turn = 0;
    decode_item(0);
    for (int64_t item = 0; item < items; ++item) {
      if (item + 1 < items) decode_item(item + 1);
      const RowTile* const row_tile = inputs + item / pairs * count;
      for (int64_t tile = 0; tile < count; ++tile, turn ^= 1) {
        // A part of what the next block of inputs needs, which may be beyond the second-level cache.
        constexpr int kPart = sizeof(RowTile) / 4;
        const char* const next =
            reinterpret_cast<const char*>(row_tile + count + tile) + item % pairs * kPart;
        for (int byte = 0; byte < kPart; byte += 64) __builtin_prefetch(next + byte, 0, 2);
        meet<kShift>(weights[item % 2], row_tile[tile], found[turn ^ 1], found[turn]);
        found[turn].scales = row_tile[tile].scales;
        found[turn].sums = sums + (tile * kSlabColumns + item % pairs * 32) * 16;
      }
    }
    add_all<kShift>(found[turn ^ 1], std::make_integer_sequence<int, 16>{});
  }

  static void multiply(const Matrix& w, int64_t out_tile, int tiles, const void* prepared, int rows,
                       float* sums) {
    if (rows <= kFewRows) return Few::multiply(w, out_tile, tiles, prepared, rows, sums);
    const TileShapes shapes;
    alignas(64) static thread_local float transposed[kMostRows * kSlabColumns];
    std::memset(transposed, 0, sizeof(float) * row_tiles(rows) * 16 * kSlabColumns);
    const RowTile* const inputs = static_cast<const RowTile*>(prepared);
    with_codebook<Fp16>(w, [&](const auto& codebook) {
      with_rate(w.tile_words, [&](auto words) {
        accumulate<words.value>(w, codebook, out_tile, tiles, inputs, rows, transposed);
      });
      const int64_t blocks = input_blocks(w);
      for (int r = 0; r < rows; ++r) {
        float* const row = sums + r * kSlabColumns;
        for (int c = 0; c < kSlabColumns; ++c)
          row[c] = transposed[(r / 16 * kSlabColumns + c) * 16 + r % 16];
        float total = 0;
        for (int64_t block = 0; block < blocks; ++block)
          total += inputs[block * row_tiles(rows) + r / 16].totals[r % 16];
        rescale<std::decay_t<decltype(codebook)>>(total, row);
      }
    });
  }
};

}  // namespace

const SlabKernels& amx_slab_kernels() {
  static const SlabKernels kernels = integer_kernels<Amx>("amx");
  return kernels;
}

}  // namespace trellis
#endif
