#include "gpu/groups.h"
#include "gpu/launch.h"

namespace blockscale::gpu {
namespace {

constexpr int kPlanThreads = 256;
constexpr int kFillThreads = 256;

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
      if (s.at) side[i] = next_group(side[i], s.spec, s.layout, s.axis, rows, p.columns);
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

// One block of threads, each with some consecutive groups.
__global__ void __launch_bounds__(kPlanThreads) plan_kernel(const __grid_constant__ PlanParams p) {
  after_previous();
  alignas(8) __shared__ uint8_t memory[kPlanThreads * sizeof(Sums)];
  auto* sums = reinterpret_cast<Sums*>(memory);
  const int thread = static_cast<int>(threadIdx.x);
  const int64_t count = p.groups.count, each = ceil_div(count, kPlanThreads);
  const int64_t first = thread * each, last = first + each < count ? first + each : count;
  const auto begin_of = [&](int64_t g) { return g == 0 ? 0 : p.groups.end(g - 1); };
  bool wrong = false;
  for (int64_t g = first; g < last; ++g)
    wrong |= p.groups.end(g) < begin_of(g) || p.groups.end(g) > p.rows;
  const bool bad = __syncthreads_or(wrong);
  const auto rows_of = [&](int64_t g) { return bad ? 0 : p.groups.end(g) - begin_of(g); };

  Sums own;
  for (int64_t g = first; g < last; ++g) own.add(p, rows_of(g));
  sums[thread] = own;
  __syncthreads();
  for (int step = 1; step < kPlanThreads; step *= 2) {
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
    store(p, at, g, bad ? 0 : begin_of(g), rows_of(g));
    at.add(p, rows_of(g));
  }
  const int tile_rows = static_cast<int>(sums[kPlanThreads - 1].tiles);
  if (thread == 0) {
    store(p, sums[kPlanThreads - 1], count, bad ? 0 : p.groups.end(count - 1), 0);
    *p.head = {tile_rows, bad};
  }
  __syncthreads();
  for (int tile = thread; tile < tile_rows; tile += kPlanThreads) {
    // The last group that starts at or before this tile: empty ones before it start there too.
    int64_t low = 0, high = count;
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (p.first_tile[middle] <= tile ? low : high) = middle;
    }
    const int64_t rows = rows_of(low);
    const int64_t begin = p.positions ? p.only().at[low].position : begin_of(low);
    p.tile_rows[tile] = {static_cast<int>(low), (tile - p.first_tile[low]) * kTile,
                         static_cast<int>(begin), static_cast<int>(Sums::source_rows(p, rows))};
  }
}

// ---- what no group writes ----

// A buffer as a matrix in memory in which groups come one after another, from left to right.
struct Memory {
  int64_t rows, pitch;  // in elements
  int64_t used;         // columns
};
BLOCKSCALE_DEVICE Memory memory_of(Layout l, int axis, int64_t rows, int64_t columns,
                                   int64_t used) {
  const int64_t all_rows = padded_rows(l, rows), all_columns = padded_columns(l, columns);
  if (l == Layout::linear && axis == -2) return {rows, columns, used};
  if (l == Layout::mn_major && axis == -1) return {columns, all_rows, used};
  return {1, all_rows * all_columns, used * (axis == -1 ? all_columns : all_rows)};
}

// Fills what lies behind the last group, T at a time; `ratio` elements of the layout are one T.
template <class T>
BLOCKSCALE_DEVICE void fill_behind(T* to, const Memory& m, int ratio, T value) {
  const int64_t pitch = m.pitch / ratio, used = m.used / ratio, left = pitch - used;
  if (m.rows >= gridDim.x) {  // without a division for every element
    for (int64_t row = blockIdx.x; row < m.rows; row += gridDim.x)
      for (int64_t c = used + threadIdx.x; c < pitch; c += kFillThreads)
        to[row * pitch + c] = value;
    return;
  }
  const int64_t step = static_cast<int64_t>(gridDim.x) * kFillThreads;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(kFillThreads) + threadIdx.x; i < m.rows * left;
       i += step)
    to[i / left * pitch + used + i % left] = value;
}

// Fills what the layout of one group holds besides its rows x columns; `slice` of `slices` parts.
template <class T>
BLOCKSCALE_DEVICE void fill_around(T* to, Layout l, int64_t all_rows, int64_t all_columns,
                                   int64_t rows, int64_t columns, T value, int64_t slice,
                                   int64_t slices) {
  const int64_t high = padded_rows(l, rows), wide = padded_columns(l, columns);
  const int64_t below = (high - rows) * wide, right = rows * (wide - columns);
  for (int64_t i = slice * kFillThreads + threadIdx.x; i < below + right;
       i += slices * kFillThreads) {
    const int64_t row = i < below ? rows + i / wide : (i - below) / (wide - columns);
    const int64_t column = i < below ? i % wide : columns + (i - below) % (wide - columns);
    to[layout_offset(l, all_rows, all_columns, row, column)] = value;
  }
}

struct FillParams {
  Side out;
  Plan plan;
  int side;
};

template <class Scale>
__global__ void __launch_bounds__(kFillThreads)
    fill_kernel(const __grid_constant__ FillParams p, Scale padding, Scale nan) {
  after_previous();
  const bool bad = p.plan.head->bad;
  const Quantized& out = p.out.out;
  const StoredShape& s = p.out.shape;
  const GroupAt* at = p.plan.side[p.side];
  const GroupAt& end = at[p.plan.count];
  const int axis = out.axis;
  const Layout codes = out.layout.codes, scales = out.layout.scales;
  auto* to_scales = reinterpret_cast<Scale*>(out.scales);
  // Lines of codes, and where groups start in them, are multiples of 8 bytes.
  fill_behind(reinterpret_cast<uint2*>(out.codes),
              memory_of(codes, axis, s.code_rows, s.code_columns, end.codes), 8, uint2{});
  fill_behind(to_scales, memory_of(scales, axis, s.scale_rows, s.scale_columns, end.scales), 1,
              bad ? nan : padding);
  if (out.spec.outer && (bad || p.out.amax))
    for (int g = static_cast<int>(blockIdx.x * kFillThreads + threadIdx.x); g < p.plan.count;
         g += static_cast<int>(gridDim.x) * kFillThreads)
      out.outer[g] = bad ? bit_cast<float>(kNanBits) : outer_of(p.out, g).dec;
  if (codes == Layout::linear && scales == Layout::linear) return;
  const int64_t slices = max(static_cast<int>(gridDim.x) / p.plan.count, 1);
  for (int64_t i = blockIdx.x; i < p.plan.count * slices; i += gridDim.x) {
    const GroupAt& g = at[i % p.plan.count];
    const int64_t slice = i / p.plan.count;
    if (codes != Layout::linear)
      fill_around(out.codes + g.codes, codes, s.code_rows, g.code_columns, g.lines,
                  g.padded / codes_per_byte(out.spec.element), uint8_t{0}, slice, slices);
    if (scales != Layout::linear)
      fill_around(to_scales + g.scales, scales, s.scale_rows, g.scale_columns,
                  ceil_div(g.lines, s.scale_lines), g.blocks, padding, slice, slices);
  }
}

}  // namespace

Plan make_plan(const Groups& groups, int64_t rows, int64_t columns, const ConstQuantized* a,
               const ConstQuantized* b, bool positions, const Stream& stream) {
  PlanParams p{};
  p.groups = groups, p.rows = rows, p.columns = columns, p.positions = positions;
  Plan plan{};
  plan.count = static_cast<int>(groups.count);
  // With a block (or transform) of more rows than are there, positions go further than rows.
  const int64_t source = positions ? (a ? a : b)->shape().padded : rows;
  plan.most_tile_rows = static_cast<int>(rounded_parts(source, groups.count, kTile) / kTile);
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
  check_launch("quantize");
  return plan;
}

void fill_groups(const Side& s, const Plan& plan, int side, const Stream& stream) {
  const FillParams p{s, plan, side};
  const Quantized& out = s.out;
  constexpr unsigned kBlocks = 512;
  if (out.spec.scale == Format::fp32)
    start(fill_kernel<uint32_t>, kBlocks, kFillThreads, 0, native(stream), p, 0u, kNanBits);
  else
    start(fill_kernel<uint8_t>, kBlocks, kFillThreads, 0, native(stream), p,
          padding_fill(out.layout.scales, out.spec.scale),
          static_cast<uint8_t>(traits(out.spec.scale).nan_code()));
  check_launch("quantize");
}

}  // namespace blockscale::gpu
