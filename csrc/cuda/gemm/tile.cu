// The host side of the wide and the tiled routes: how the product is cut into tiles, what scratch that
// takes, the two launches.
#include <algorithm>

#include "launch.cuh"
#include "tiled.cuh"
#include "wide.cuh"

namespace trellis::cuda {
namespace {

constexpr int64_t kBand = 2048;  // rows that are worked on side by side

int64_t parts_of(const TileSchedule& s) {
  if (s.rest == 0 || s.share % s.pitch == 0) return 0;  // every piece is a whole tile
  return static_cast<int64_t>(s.workers) * 2 * kBlocks * s.rows * 128;
}

// What a piece of a tile takes besides its steps, in steps, as measured: rows leave, and where blocks share a
// tile, they meet first.
struct FinishCost {
  int64_t whole, part;
};
constexpr FinishCost finish_cost(int rows) {
  return rows == 256 ? FinishCost{11, 16} : rows == 128 ? FinishCost{6, 13} : FinishCost{4, 6};
}

// How many blocks should share a tile: as many as fit at once, unless stretches keep so many more
// multiprocessors busy that it pays for their way through scratch, which takes about ten steps. A
// cluster must fit a group of multiprocessors, and some of those have an odd number to spare.
int best_slices(int64_t tiles, int64_t steps, int sm_count) {
  int slices = 1;
  for (int more = 2; more <= 8 && steps >= more * 4; more *= 2) {
    if (tiles * more * 8 <= sm_count * (more == 2 ? 7 : 6)) slices = more;
  }
  const int64_t sliced = (steps + slices - 1) / slices;
  const int64_t stretch = (tiles * steps + sm_count - 1) / sm_count;
  return sliced <= stretch + 10 ? slices : 1;
}

TileScratch take_scratch(const TileSchedule& s, Arena& arena) {
  TileScratch scratch = {};
  Rotated& rotated = scratch.rotated;
  const int64_t rows = static_cast<int64_t>(s.row_tiles) * s.rows;
  rotated.row_groups = static_cast<int>(rows / 8);
  rotated.counters = static_cast<int64_t>(s.rest) * kBlocks * (s.rows / out_rows(s.rows));
  // Blocks of 128 inputs, as they are rotated.
  rotated.x = arena.take<uint32_t>((s.steps + 1) / 2 * 2 * rows * 32);
  rotated.row_scales = arena.take<float>(rows);
  rotated.arrived = arena.take<unsigned>(rotated.counters);
  scratch.parts = arena.take<float>(parts_of(s));
  return scratch;
}

}  // namespace

TileSchedule tile_schedule(const Gemm& g, Route route, int sm_count, int64_t share) {
  TileSchedule s = {};
  s.rows = route == Route::Wide64 ? 64 : route == Route::Wide256 ? 256 : 128;
  s.wgmma = route != Route::Tiled128;
  s.slices = 1;
  s.row_tiles = static_cast<int>((g.m + s.rows - 1) / s.rows);
  constexpr int64_t kTileTiles = kBlocks * 8;
  s.columns = static_cast<int>((g.out_tiles + kTileTiles - 1) / kTileTiles);
  s.steps = static_cast<int>((g.in_tiles + kStepTiles - 1) / kStepTiles);
  s.band = static_cast<int>(std::min<int64_t>(kBand / s.rows, s.row_tiles));
  const int64_t tiles = static_cast<int64_t>(s.row_tiles) * s.columns;
  if (share <= 0 && s.rows <= 128 && s.wgmma) {
    s.slices = share < 0 ? static_cast<int>(-share) : best_slices(tiles, s.steps, sm_count);
    s.slices = std::min(s.slices, s.steps);
  }
  s.cluster = s.rows == 256 ? 2 : s.slices;
  if (s.slices > 1) {
    s.rounds = 1;
    s.workers = static_cast<int>(tiles);
    return s;
  }
  const int64_t most = std::max(1, sm_count / s.cluster);
  // The last full round joins the rest, so that stretches are at least a tile long, unless there is
  // no full round or nothing left. Whole tiles in the last round too, where that costs no more.
  const int64_t rounds = tiles % most == 0 ? tiles / most : std::max<int64_t>(0, tiles / most - 1);
  const int64_t of_rest = ((tiles - rounds * most) * s.steps + most - 1) / most;
  const FinishCost cost = finish_cost(s.rows);
  const bool whole = share <= 0 && (tiles + most - 1) / most * (s.steps + cost.whole) <=
                                       rounds * (s.steps + cost.whole) + of_rest +
                                           (of_rest / s.steps + 1) * cost.part;
  s.rounds = share > 0 ? 0 : static_cast<int>(whole ? tiles / most : rounds);
  s.rest = static_cast<int>(tiles - s.rounds * most);
  s.pitch = s.steps;
  s.share = whole ? s.steps : static_cast<int>(share);
  if (share <= 0 && !whole) {
    s.share = static_cast<int>(of_rest);
    // Stretches that end where tiles do leave one part each instead of two; worth a few steps.
    const int64_t parts = std::min<int64_t>(s.rest == 0 ? 0 : most / s.rest, s.steps);
    const int64_t even = parts == 0 ? 0 : (s.steps + parts - 1) / parts;
    if (parts > 1 && even <= s.share + 4 && even * (parts - 1) < s.steps) {
      s.share = static_cast<int>(even);
      s.pitch = static_cast<int>(even * parts);
    }
    s.share = std::max(1, s.share);
  }
  const int64_t units = static_cast<int64_t>(s.rest) * s.pitch;
  s.workers = static_cast<int>(s.rounds > 0 ? most : (units + s.share - 1) / s.share);
  return s;
}

int64_t tile_scratch_bytes(const TileSchedule& schedule) {
  Arena arena(nullptr);
  take_scratch(schedule, arena);
  return arena.bytes();
}

cudaError_t launch_tiles(const Gemm& g, const TileSchedule& schedule, void* memory,
                         cudaStream_t stream) {
  Arena arena(memory);
  const TileScratch scratch = take_scratch(schedule, arena);
  const cudaError_t error =
      launch_rotate(g, scratch.rotated, Operand::kSwizzled,
                    static_cast<int64_t>(schedule.row_tiles) * schedule.rows, stream);
  if (error != cudaSuccess) return error;
  return with_rate(g.tile_words, [&](auto tile_words) {
    return schedule.wgmma ? launch_wide_rate<tile_words.value>(g, scratch, schedule, stream)
                          : launch_tiled_rate<tile_words.value>(g, scratch, schedule, stream);
  });
}

}  // namespace trellis::cuda
