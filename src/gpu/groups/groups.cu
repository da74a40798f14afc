#include "gpu/groups/groups.h"
#include "gpu/quantize/fill.h"
#include "gpu/quantize/host.h"

namespace blockscale::gpu {
namespace {

constexpr int kPlanThreads = 256;

// One operand, as the plan needs it.
struct PlanSide {
  QuantSpec spec;
  StorageLayout layout;
  StoredShape whole;
  int axis;
  GroupAt* at;  // null: none
};
struct PlanParams {
  Groups groups;
  int64_t rows, columns;
  PlanSide side[2];
  bool positions;
  PlanHead* head;
  TileRow* tile_rows;
  int* first_tile;  // of every group, and the end

  BLOCKSCALE_DEVICE const PlanSide& only() const { return side[side[0].at ? 0 : 1]; }
};

// Running sums over groups.
struct Sums {
  GroupStart side[2];
  int64_t tiles = 0;

  BLOCKSCALE_DEVICE void add(const PlanParams& p, int64_t rows) {
    for (int i = 0; i < 2; ++i) {
      const PlanSide& s = p.side[i];
      if (s.at) side[i] = next_group(side[i], s.spec, s.layout, s.axis, rows);
    }
    tiles += ceil_div(source_rows(p, rows), kTile);
  }
  BLOCKSCALE_DEVICE void add(const Sums& other) {
    for (int i = 0; i < 2; ++i) {
      side[i].row += other.side[i].row;
      side[i].position += other.side[i].position;
      side[i].codes += other.side[i].codes;
      side[i].scales += other.side[i].scales;
    }
    tiles += other.tiles;
  }
  // Rows of a group in what the kernel reads.
  BLOCKSCALE_DEVICE static int64_t source_rows(const PlanParams& p, int64_t rows) {
    if (!p.positions) return rows;
    const PlanSide& s = p.only();
    return stored_shape(s.spec, s.layout, s.axis, rows, p.columns).padded;
  }
};

BLOCKSCALE_DEVICE void store(const PlanParams& p, const Sums& at, int64_t g, int64_t begin,
                             int64_t rows) {
  p.first_tile[g] = static_cast<int>(at.tiles);
  for (int i = 0; i < 2; ++i) {
    const PlanSide& s = p.side[i];
    if (!s.at) continue;
    GroupStart start = at.side[i];
    start.row = begin;
    if (g == p.groups.count) {
      GroupAt behind{};
      behind.codes = start.codes, behind.scales = start.scales;
      behind.position = start.position, behind.row = static_cast<int>(begin);
      s.at[g] = behind;
      continue;
    }
    const GroupPart part = group_part(s.spec, s.layout, s.axis, s.whole, start, rows, p.columns);
    s.at[g] = {part.codes,
               part.scales,
               s.axis == -1 ? begin : 0,
               start.position,
               static_cast<int>(begin),
               static_cast<int>(rows),
               static_cast<int>(part.shape.lines),
               static_cast<int>(part.shape.padded),
               static_cast<int>(part.shape.blocks),
               static_cast<int>(part.shape.code_columns),
               static_cast<int>(part.shape.scale_columns)};
  }
}

// One thread block; each thread takes some consecutive groups.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  after_previous(p);
  alignas(8) __shared__ uint8_t memory[kPlanThreads * sizeof(Sums)];
  auto* sums = reinterpret_cast<Sums*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t count = p.groups.count, each = ceil_div(count, kPlanThreads);
  const int64_t first = thread * each, last = first + each < count ? first + each : count;
  bool wrong = false;
  for (int64_t g = first; g < last; ++g) wrong |= p.groups.is_wrong(g, p.rows);
  const bool all_wrong = __syncthreads_or(wrong);
  const auto rows_of = [&](int64_t g) {
    return all_wrong ? 0 : p.groups.end(g) - p.groups.begin(g);
  };

  Sums own;
  for (int64_t g = first; g < last; ++g) own.add(p, rows_of(g));
  sums[thread] = own;
  __syncthreads();
  // Threads without groups add nothing, so the total is the sum of the last thread that has some.
  const int used = static_cast<int>(count < kPlanThreads ? count : kPlanThreads);
  for (int step = 1; step < used; step *= 2) {
    const bool has = thread >= step;
    Sums before;
    if (has) before = sums[thread - step];
    __syncthreads();
    if (has) sums[thread].add(before);
    __syncthreads();
  }
  Sums at;
  if (thread > 0) at = sums[thread - 1];
  for (int64_t g = first; g < last; ++g) {
    store(p, at, g, all_wrong ? 0 : p.groups.begin(g), rows_of(g));
    if (g + 1 < last) at.add(p, rows_of(g));
  }
  const int tile_rows = static_cast<int>(sums[used - 1].tiles);
  if (thread == 0) {
    store(p, sums[used - 1], count, all_wrong ? 0 : p.groups.end(count - 1), 0);
    *p.head = {tile_rows, all_wrong};
  }
  __syncthreads();
  // With one group per thread, as nearly always, from shared memory.
  const auto first_tile = [&](int64_t g) {
    return each == 1 && g > 0 ? static_cast<int>(sums[g - 1].tiles) : p.first_tile[g];
  };
  for (int tile = thread; tile < tile_rows; tile += kPlanThreads) {
    // The last group that starts at or before this tile: empty groups before it start there too.
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (first_tile(middle) <= tile ? low : high) = middle;
    }
    const int64_t rows = rows_of(low);
    const int64_t begin = p.positions ? p.only().at[low].position : p.groups.begin(low);
    p.tile_rows[tile] = {static_cast<int>(low), (tile - first_tile(low)) * kTile,
                         static_cast<int>(begin), static_cast<int>(Sums::source_rows(p, rows))};
  }
}

struct FillParams {
  Side side[2];
  Plan plan;
};

// The thread blocks take the groups in turn, and all of them share what lies behind the groups.
__global__ void __launch_bounds__(kFillThreads) fill_kernel(const __grid_constant__ FillParams p) {
  after_previous(p);
  const int count = p.plan.count, blocks = static_cast<int>(gridDim.x);
  const int slices = max(blocks / count, 1);
  for (int i = 0; i < 2; ++i) {
    const GroupAt* at = p.plan.side[i];
    if (!at) continue;
    const Side& whole = p.side[i];
    fill_behind_groups(whole, at[count].codes, at[count].scales, count, p.plan.head->wrong,
                       {static_cast<int>(blockIdx.x), blocks});
    if (whole.plain) continue;
    for (int n = static_cast<int>(blockIdx.x); n < count * slices; n += blocks) {
      Side side = whole;
      const MatrixAt m = group_at(side, whole, p.plan, i, n % count, no_outer());
      fill_around_group(side, m, {n / count, slices});
    }
  }
}

}  // namespace

Plan make_plan(const Groups& groups, int64_t rows, int64_t columns, const ConstQuantized* a,
               const ConstQuantized* b, bool positions, const Stream& stream) {
  PlanParams p{};
  p.groups = groups, p.rows = rows, p.columns = columns, p.positions = positions;
  Plan plan{};
  plan.count = static_cast<int>(groups.count);
  // With a block (or transform) of more rows than there are, positions go further than rows.
  const int64_t source = positions ? (a ? a : b)->shape().padded : rows;
  plan.most_tile_rows = most_tile_rows(source, groups.count);
  const auto take = [&stream](auto*& to, int64_t count) {
    using T = std::remove_reference_t<decltype(*to)>;
    to = static_cast<T*>(stream.workspace(count * static_cast<int64_t>(sizeof(T))));
  };
  take(p.head, 1);
  take(p.tile_rows, plan.most_tile_rows);
  take(p.first_tile, groups.count + 1);
  const ConstQuantized* operands[] = {a, b};
  for (int i = 0; i < 2; ++i) {
    if (!operands[i]) continue;
    const ConstQuantized& q = *operands[i];
    p.side[i] = {q.spec, q.layout, q.shape(), q.axis, nullptr};
    take(p.side[i].at, groups.count + 1);
    plan.side[i] = p.side[i].at;
  }
  plan.head = p.head;
  plan.tile_rows = p.tile_rows;
  start(plan_kernel, 1, kPlanThreads, 0, native(stream), p);
  return plan;
}

void fill_groups(const Side& row, const Side& column, const Plan& plan, const Stream& stream) {
  constexpr unsigned kBlocks = 512;
  start(fill_kernel, kBlocks, kFillThreads, 0, native(stream), FillParams{{row, column}, plan});
}

}  // namespace blockscale::gpu
