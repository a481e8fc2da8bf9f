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

// What a piece of a tile takes besides its steps, in steps, as measured: rows leave; where blocks that come at the
// same time share the tile, they meet first; where they come at different times, the last one adds all there is.
struct FinishCost {
  int64_t whole, even, stretch;
};
constexpr FinishCost finish_cost(int rows) {
  return rows == 256   ? FinishCost{11, 14, 28}
         : rows == 128 ? FinishCost{6, 11, 21}
                       : FinishCost{4, 6, 12};
}

// How many blocks should share a tile as a cluster: as many as fit at once, unless stretches keep so many more
// multiprocessors busy that it pays for their way through scratch. A cluster must fit a group of multiprocessors,
// and some of those have an odd number to spare. Two blocks meet as well without one.
int best_slices(int64_t tiles, int64_t steps, int sm_count) {
  int slices = 1;
  for (int more = 4; more <= 8 && steps >= more * 4; more *= 2) {
    if (tiles * more * 8 <= sm_count * 6) slices = more;
  }
  const int64_t sliced = (steps + slices - 1) / slices;
  const int64_t stretch = (tiles * steps + sm_count - 1) / sm_count;
  return sliced <= stretch + 6 ? slices : 1;
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
  const auto set = [&s, tiles, most](int64_t rounds, int64_t of_share, int64_t pitch) {
    s.rounds = static_cast<int>(rounds);
    s.rest = static_cast<int>(tiles - rounds * most);
    s.share = static_cast<int>(of_share), s.pitch = static_cast<int>(pitch);
  };
  if (share > 0) {
    set(0, share, s.steps);
  } else {
    const FinishCost finish = finish_cost(s.rows);
    const int64_t whole = s.steps + finish.whole, full = tiles / most, left = tiles % most;
    s.cost = (full + (left > 0 ? 1 : 0)) * whole;
    set(full, s.steps, s.steps);
    // What no full round is left for in even parts, one a worker.
    const int64_t even = left == 0 ? s.steps : (s.steps + most / left - 1) / (most / left);
    const int64_t of_even = full * whole + even + finish.even;
    if (even < s.steps && of_even < s.cost) {
      s.cost = of_even;
      set(full, even, (s.steps + even - 1) / even * even);
    }
    // Or in equal stretches, one after the other, together with the round before, so that they are at least a tile
    // long.
    const int64_t rounds = std::max<int64_t>(0, full - 1);
    const int64_t stretch = ((tiles - rounds * most) * s.steps + most - 1) / most;
    const int64_t of_stretches =
        rounds * whole + stretch + (stretch / s.steps + 1) * finish.stretch;
    if (left > 0 && of_stretches < s.cost) {
      s.cost = of_stretches;
      set(rounds, stretch, s.steps);
    }
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
