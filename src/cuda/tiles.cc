#include "cuda/tiles.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

#include "blockscale/spec.h"

namespace blockscale::cuda {
namespace {

constexpr double kSharedBytes = 128;  // moved by a multiprocessor's shared memory per cycle
constexpr double kL2Bytes = 37;       // a multiprocessor gets from L2 per cycle when all ask
constexpr double kL2Shared = 33;      // the same for clusters that share an operand
constexpr double kL2Most = 48;        // and when few ask
constexpr double kLatency = 200;      // of a wgmma chain: barrier, issue, drain
constexpr double kTileStart = 1500;   // the first stage of a tile that finds the ring empty
constexpr double kGather = 1500;      // CTAs of a cluster wait for each other at start and end
constexpr double kMeeting = 1.05;     // factor for two warpgroups, see step_cost()
constexpr double kJoin = 2000;        // a cluster's parts meet and are added
constexpr double kPromotion = 0.047;  // per element with a scale per column: registers are busy
constexpr double kInTurn = 0.042;     // the same where four waves (with_scales()) share the scales
// Of a line of B in a block, in codes of half a byte or of a byte: what the warps that decode take
// for it, and how long shared memory, of which the L1 cache is a part, is busy with its codes.
constexpr double kDecodeHalf = 7.5, kDecodeByte = 9;
constexpr double kLoadHalf = 1, kLoadByte = 2.3;
constexpr double kMemoryBytes = 13;  // that a multiprocessor gets from memory per cycle
constexpr double kF32Bytes = 20;     // of FP32 output that a multiprocessor writes per cycle
constexpr double kRound = 300;       // until a staged round of it has left

// Clusters that fit on these multiprocessors; of clusters of four, fewer than the count says (30 on
// an H200).
int64_t clusters_of(const TileShape& t, int multiprocessors) {
  return std::max(1, (t.cluster == 4 ? multiprocessors * 10 / 11 : multiprocessors) / t.cluster);
}

int64_t unit_count(const TileShape& t, const GemmSize& s) {
  return s.groups * ceil_div(s.rows, t.unit_rows()) * ceil_div(s.columns, t.unit_columns());
}

// Cycles for one block of 128 along K in one CTA: the slowest of the resources that it keeps busy.
double step_cost(const TileShape& t, const GemmSize& s, double l2_bytes) {
  const bool square = s.square;
  const double tensor = t.rows() * t.columns() / 32.0;
  const double wgmmas = t.groups * t.waves;
  const double arriving = (t.rows() + t.columns()) * 128.0;
  const double lines = s.code_bytes > 0 ? t.columns() : 0;  // of B, to decode
  const double decoding = lines * (s.code_bytes < 1 ? kDecodeHalf : kDecodeByte);
  const double codes = lines * (s.code_bytes < 1 ? kLoadHalf : kLoadByte);
  const double shared = (wgmmas * (64 + t.n) * 128.0 + arriving) / kSharedBytes + codes;
  // One warpgroup by itself: its wgmmas and promotions follow each other. Without scales the next
  // block's wgmmas are queued before this one's have ended.
  const double promotion = s.scaled ? t.n / 2 * (square ? 1.0 : 2.5) + kLatency : 0;
  const double chain = t.waves * (t.n * 2 + promotion);
  const int rows = static_cast<int>(std::min<int64_t>(t.rows(), s.rows));
  const double own =
      t.pairs_columns() ? t.columns() + rows / t.sharing() : rows + t.columns() / t.sharing();
  const double asked = own * 128 - lines * (128 - kStageValues * s.code_bytes);
  const double promoting =
      square || !s.scaled ? 0 : t.rows() * t.columns() * (t.waves == 2 ? kInTurn : kPromotion);
  // Two warpgroups contend for the tensor cores now and then; of three, one is always ready.
  const double meeting = t.groups == 2 ? kMeeting : 1;
  return std::max({tensor, shared, chain, promoting, decoding, asked / l2_bytes}) * meeting;
}

// Cycles in which a tile of output is written and nothing else happens.
double store_cost(const TileShape& t, const GemmSize& s) {
  const double elements = t.rows() * t.columns();
  if (!s.f32) return elements * 2 / 64;
  const int64_t chunks = t.with_scales(s.square).chunks();
  const int64_t rounds = chunks > 0 ? ceil_div(t.waves * t.n / 32, chunks) : 1;
  return elements * 4 / kF32Bytes + static_cast<double>(rounds - 1) * kRound;
}

std::span<const TileShape> tiles_of(const GemmSize& s) {
  if (s.scaled) return kTiles;
  return s.code_bytes > 0 ? std::span<const TileShape>(kCodedTiles) : kBf16Tiles;
}

}  // namespace

double tile_cost(const TileShape& t, const GemmSize& s) {
  if (t.cluster > s.multiprocessors) return std::numeric_limits<double>::infinity();
  const int64_t units = unit_count(t, s);
  const int64_t clusters = clusters_of(t, s.multiprocessors);
  // CTAs that split K do not stay for a second tile.
  if (t.split && (units > clusters || s.grouped)) return std::numeric_limits<double>::infinity();
  const double asking = static_cast<double>(std::min(units, clusters) * t.cluster);
  // BF16 takes so much power that the clock drops, but not that of L2.
  const double l2_all = !s.scaled ? kL2Most : t.sharing() > 1 ? kL2Shared : kL2Bytes;
  const double l2_bytes = std::min(kL2Most, l2_all * s.multiprocessors / asking);
  return static_cast<double>(ceil_div(units, clusters)) *
             (static_cast<double>(ceil_div(s.blocks, t.parts())) * step_cost(t, s, l2_bytes) +
              kTileStart + store_cost(t, s) + (t.split ? kJoin : 0)) +
         (t.sharing() > 1 ? kGather : 0);
}

namespace {

struct Choice {
  int tile;
  double cost;
};
Choice cheapest(const GemmSize& s) {
  const std::span<const TileShape> tiles = tiles_of(s);
  Choice best{0, tile_cost(tiles[0], s)};
  for (int i = 1; i < static_cast<int>(tiles.size()); ++i) {
    const TileShape& tile = tiles[static_cast<size_t>(i)];
    if (!tile.compiled(s.square, s.a_e5m2, s.b_e5m2)) continue;
    if (const double cost = tile_cost(tile, s); cost < best.cost) best = {i, cost};
  }
  return best;
}

// What another library takes for a dense product of BF16: it may divide K.
double library_cost(const GemmSize& s) {
  constexpr double kTensor = 1.3, kMemory = 1.1;  // actual cycles relative to the least possible
  const auto rows = static_cast<double>(s.rows), columns = static_cast<double>(s.columns);
  const double tensor = rows * columns / 32, memory = (rows + columns) * 128 / kMemoryBytes;
  return std::max(kTensor * tensor, kMemory * memory) * static_cast<double>(s.blocks) /
         s.multiprocessors;
}
// And for adding up the parts and finishing the sums.
double passes_cost(const GemmSize& s) {
  constexpr double kPasses = 14600;
  constexpr double kPassBytes = 10;  // that those kernels move per element
  return static_cast<double>(s.rows * s.columns) * kPassBytes / kMemoryBytes / s.multiprocessors +
         kPasses;
}
constexpr double kBrief = 8000;  // 4.5 us

}  // namespace

int choose_tile(const GemmSize& s) { return cheapest(s).tile; }

bool pays(const GemmSize& s) { return cheapest(s).cost <= library_cost(s) + passes_cost(s); }

bool is_brief(const GemmSize& s) { return cheapest(s).cost < kBrief; }

bool pays_to_decode(const GemmSize& s, bool needs_pass) {
  constexpr double kMargin = 1.1;  // estimates are no better than that
  GemmSize values = s;
  values.code_bytes = 0;
  double before = cheapest(values).cost;
  if (!s.grouped && needs_pass)
    before = std::min(before, library_cost(values) + passes_cost(values));
  else if (!s.grouped && before >= kBrief)
    before = library_cost(values);
  const auto codes = static_cast<double>(s.groups * s.columns * s.blocks * kStageValues);
  before += codes * (s.code_bytes + 2) / kMemoryBytes / s.multiprocessors;
  return kMargin * cheapest(s).cost < before;
}

int choose_band(const TileShape& t, const GemmSize& s) {
  const auto clusters = static_cast<double>(clusters_of(t, s.multiprocessors));
  // The side of a square of all that runs at once, in elements.
  const double side = std::sqrt(clusters * t.unit_rows() * t.unit_columns());
  return std::max(1, static_cast<int>(std::lround(side / t.unit_rows())));
}

bool wants_dynamic(const TileShape& t, const GemmSize& s) {
  return unit_count(t, s) > clusters_of(t, s.multiprocessors);
}

}  // namespace blockscale::cuda
