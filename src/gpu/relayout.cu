// Codes and scales from one storage layout to another.
#include "gpu/quantize/host.h"

namespace blockscale::gpu {
namespace {

constexpr int kRelayoutThreads = 256;

// Scales move by words: one FP32 scale, or four one-byte scales along a line.
constexpr int kWords = 16;  // per line of a tile of kTile lines

// Parts of the work: `down` x `across` for each matrix of the batch.
struct Parts {
  int down, across;
  int64_t count;
};

// The extent of a matrix of scales.
struct Extent {
  int rows, bytes;  // bytes per row
};

struct RelayoutParams {
  ConstQuantized from;
  Quantized to;
  StoredShape f, t;
  int64_t outers;  // outer scales
  int scale_bytes;
  LayoutTraits code_traits, scale_traits;  // of `to`
  Parts codes, scales;                     // computed once: their divisions take a while
  int copies_scales;                       // copied as they lie
  Extent used, padded;                     // scales of `to`, without and with padding
  uint32_t spread;                         // one in this many parts is of scales
  Plan plan;                               // of groups; side 0 is `from`
};

// Goes on to one group: `p` becomes that group's.
BLOCKSCALE_DEVICE void enter_group(RelayoutParams& p, int group) {
  const GroupAt from = p.plan.side[0][group], to = p.plan.side[1][group];
  const auto extents = [](StoredShape& s, const GroupAt& at, int per_byte) {
    s.lines = at.lines;
    s.blocks = at.blocks;
    s.line_bytes = at.padded / per_byte;
    s.code_columns = at.code_columns;
    s.scale_columns = at.scale_columns;
  };
  const int per_byte = codes_per_byte(p.to.spec.element);
  extents(p.f, from, per_byte);
  extents(p.t, to, per_byte);
  p.from.codes += from.codes;
  p.from.scales += from.scales * p.scale_bytes;
  p.to.codes += to.codes;
  p.to.scales += to.scales * p.scale_bytes;
}

// ---- codes ----

// 16 bytes, of which `count` exist: none, 8, or at least 16.
BLOCKSCALE_DEVICE uint4 load_chunk(const uint8_t* from, int64_t count) {
  if (count >= 16 && reinterpret_cast<uintptr_t>(from) % 16 == 0)
    return *reinterpret_cast<const uint4*>(from);
  uint2 half[2] = {};
  if (count >= 8) half[0] = reinterpret_cast<const uint2*>(from)[0];
  if (count >= 16) half[1] = reinterpret_cast<const uint2*>(from)[1];
  return {half[0].x, half[0].y, half[1].x, half[1].y};
}
BLOCKSCALE_DEVICE void store_chunk(uint8_t* to, int64_t count, const uint4& v) {
  if (count >= 16 && reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    *reinterpret_cast<uint4*>(to) = v;
    return;
  }
  if (count >= 8) reinterpret_cast<uint2*>(to)[0] = {v.x, v.y};
  if (count >= 16) reinterpret_cast<uint2*>(to)[1] = {v.z, v.w};
}

// A part of the codes, in chunks of 16 bytes: kCopied chunks per thread where codes are copied as
// they lie, else a piece of kPieceLines lines, of which a warp takes 8 lines of 64 bytes. Both
// layouts keep 16 bytes together, and a warp's chunks then lie in runs of 64 bytes or more.
constexpr int kCopied = 4, kPieceLines = 16, kPieceBytes = 1024;

// Copies part `part` of `all` bytes.
BLOCKSCALE_DEVICE void copy_part(uint8_t* target, const uint8_t* source, int64_t all,
                                 int64_t part) {
  const int64_t first = (part * kRelayoutThreads * kCopied + threadIdx.x) * 16;
  const uintptr_t places =
      reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target);
  uint4 v[kCopied];
  if (places % 16 == 0 && (part + 1) * kRelayoutThreads * kCopied * 16 <= all) {
    const auto* from = reinterpret_cast<const uint4*>(source + first);
    auto* to = reinterpret_cast<uint4*>(target + first);
#pragma unroll
    for (int i = 0; i < kCopied; ++i) v[i] = load_once(from + i * kRelayoutThreads);
#pragma unroll
    for (int i = 0; i < kCopied; ++i) to[i * kRelayoutThreads] = v[i];
    return;
  }
#pragma unroll
  for (int i = 0; i < kCopied; ++i) {
    const int64_t at = first + i * kRelayoutThreads * 16;
    v[i] = load_chunk(source + at, all - at);
  }
#pragma unroll
  for (int i = 0; i < kCopied; ++i) {
    const int64_t at = first + i * kRelayoutThreads * 16;
    store_chunk(target + at, all - at, v[i]);
  }
}
BLOCKSCALE_DEVICE void copy_codes(const RelayoutParams& p, int64_t part) {
  copy_part(p.to.codes, p.from.codes, p.to.batch * p.t.code_bytes, part);
}

// Where chunk (line, byte) of codes lies, and the distance from 64 bytes of a line to the next 64.
// As layout_offset(), but with products of 32 bits: with 64 a relayout takes 2% longer.
BLOCKSCALE_DEVICE int64_t chunk_at(Layout codes, const StoredShape& s, int line, int byte) {
  const auto columns = static_cast<int>(s.code_columns);
  if (codes == Layout::linear) return static_cast<int64_t>(line) * columns + byte;
  constexpr int kMultiple = traits(Layout::mfma_16x16).column_multiple;
  const int across = padded_as(columns, kMultiple);
  return static_cast<int64_t>(line / 16) * (16 * across) + byte * 16 + line % 16 * 16;
}
BLOCKSCALE_DEVICE int next_64(Layout codes) {
  constexpr int kMfma = layout_column_as<int>(Layout::mfma_16x16, 0, 64);
  return codes == Layout::linear ? 64 : kMfma;
}

BLOCKSCALE_DEVICE void move_codes(const RelayoutParams& p, int batch, int row, int column) {
  const Layout from = p.from.layout.codes, to = p.to.layout.codes;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int r = row * kPieceLines + warp % 2 * 8 + lane % 8;
  const int c = column * kPieceBytes + warp / 2 * 256 + lane / 8 * 16;
  const uint8_t* source = p.from.codes + batch * p.f.code_bytes + chunk_at(from, p.f, r, c);
  uint8_t* target = p.to.codes + batch * p.t.code_bytes + chunk_at(to, p.t, r, c);
  const auto lines = static_cast<int>(p.t.lines), bytes = static_cast<int>(p.t.line_bytes);
  uint4 v[4];
  const uintptr_t places =
      reinterpret_cast<uintptr_t>(source) | reinterpret_cast<uintptr_t>(target);
  if (places % 16 == 0 && r < lines && c + 256 <= bytes) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = load_once(reinterpret_cast<const uint4*>(source + i * next_64(from)));
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint4*>(target + i * next_64(to)) = v[i];
    return;
  }
  const int left = (r < lines ? bytes : 0) - c;
  // Past the codes of a line comes the padding of the layout, which is 0.
  const bool there = r < padded_as(lines, p.code_traits.row_multiple);
  const int kept = (there ? padded_as(bytes, p.code_traits.column_multiple) : 0) - c;
#pragma unroll
  for (int i = 0; i < 4; ++i) v[i] = load_chunk(source + i * next_64(from), left - i * 64);
#pragma unroll
  for (int i = 0; i < 4; ++i) store_chunk(target + i * next_64(to), kept - i * 64, v[i]);
}

// ---- scales ----

// A word of a tile and its offset; or the distance to another word.
struct WordAt {
  int row, word;
  int64_t bytes;
};
// Whether neighbouring threads have neighbouring words, as `first` below gives them.
static_assert([] {
  for (int i = 0; i < kRelayoutThreads; ++i) {
    const int row = i % 4 * 32 + i / 4 % 32;
    if (layout_offset(Layout::nv_128x4, kTile, 8, row, i / kTile * 4) != 4 * i) return false;
    const int byte = (i / 64 * 2 + i / 2 % 2) * 4;
    if (layout_offset(Layout::aiter_scale, 32, 32, i % 2 * 16 + i / 4 % 16, byte) !=
        i / 64 * 256 + i % 64)
      return false;
  }
  return true;
}());

// The scales of one side, as words of a layout.
struct Words {
  Layout layout;
  int gap;       // bytes from one byte of a word to the next
  bool aligned;  // words are words of memory
  // For a tile of kTile x kWords, in memory order: this thread's first word, the step to the
  // second, and the step to the third, which repeats.
  WordAt first, second, third;

  BLOCKSCALE_DEVICE Words(const uint8_t* scales, Layout l, const StoredShape& s, int scale_bytes,
                          int tile_row, int tile_word)
      : layout(l), gap(l == Layout::aiter_scale ? 64 : 1) {
    const int i = static_cast<int>(threadIdx.x);
    const int64_t pitch = s.scale_columns * scale_bytes;
    if (l == Layout::linear) {
      first = {i / kWords, i % kWords, 0};
      second = {kRelayoutThreads / kWords, 0, kRelayoutThreads / kWords * pitch};
      third = {2 * second.row, 0, 2 * second.bytes};
    } else if (l == Layout::aiter_scale) {
      first = {i % 2 * 16 + i / 4 % 16, i / 64 * 2 + i / 2 % 2, 0};
      second = {0, kRelayoutThreads / 32, kRelayoutThreads * 4};
      third = {32, 0, 32 * round_up(pitch, traits(Layout::aiter_scale).column_multiple)};
    } else {
      const int64_t column = l == Layout::mn_major
                                 ? 4 * round_up(s.scale_rows, traits(Layout::mn_major).row_multiple)
                                 : 512;
      if (l == Layout::mn_major)
        first = {i % kTile, i / kTile, 0};
      else
        first = {i % 4 * 32 + i / 4 % 32, i / kTile, 0};
      second = {0, kRelayoutThreads / kTile, kRelayoutThreads / kTile * column};
      third = {0, 2 * second.word, 2 * second.bytes};
    }
    first.bytes = offset(s, scale_bytes, tile_row + first.row, tile_word + first.word);
    aligned = gap == 1 && reinterpret_cast<uintptr_t>(scales) % 4 == 0 &&
              (l != Layout::linear || pitch % 4 == 0);
  }
  BLOCKSCALE_DEVICE int64_t offset(const StoredShape& s, int scale_bytes, int64_t row,
                                   int64_t word) const {
    return layout_offset(layout, s.scale_rows, s.scale_columns, row,
                         scale_bytes == 4 ? word : word * 4) *
           scale_bytes;
  }
  BLOCKSCALE_DEVICE WordAt at(int i) const {
    const int a = i % 2, b = i / 2;
    return {first.row + a * second.row + b * third.row,
            first.word + a * second.word + b * third.word,
            first.bytes + a * second.bytes + b * third.bytes};
  }
  // The bytes of a word, of which `count` exist.
  BLOCKSCALE_DEVICE uint32_t load(const uint8_t* from, int count) const {
    if (aligned && count == 4) return *reinterpret_cast<const uint32_t*>(from);
    uint32_t v = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) v |= static_cast<uint32_t>(from[i * gap]) << (8 * i);
    return v;
  }
  BLOCKSCALE_DEVICE void store(uint8_t* to, int count, uint32_t v) const {
    if (aligned && count == 4) {
      *reinterpret_cast<uint32_t*>(to) = v;
      return;
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (i < count) to[i * gap] = static_cast<uint8_t>(v >> (8 * i));
  }
};

// Where a word of a tile lies in shared memory: the words of a column, and of every 32nd row, are
// in different banks.
BLOCKSCALE_DEVICE int slot(const WordAt& at) {
  return at.row * (kWords + 1) + at.row / 32 * 8 + at.word;
}
constexpr int kSlots = kTile * (kWords + 1) + 4 * 8;

// Moves tile (row, column) of one matrix: reads in the order of one layout, writes in that of the
// other, including the other's padding.
BLOCKSCALE_DEVICE void move_scales(const RelayoutParams& p, int batch, int tile_row,
                                   int tile_column) {
  __shared__ uint32_t tile[kSlots];
  constexpr int kEach = kTile * kWords / kRelayoutThreads;
  const int bytes = p.scale_bytes, first_row = tile_row * kTile, first_word = tile_column * kWords;
  const uint8_t* source = p.from.scales + batch * p.f.scale_count * bytes;
  uint8_t* target = p.to.scales + batch * p.t.scale_count * bytes;
  // Whether the whole tile lies within an extent and, if not, how many bytes of a word do.
  const auto holds = [&](const Extent& e) {
    return first_row + kTile <= e.rows && (first_word + kWords) * 4 <= e.bytes;
  };
  const auto count_of = [&](const WordAt& at, const Extent& e) {
    return first_row + at.row < e.rows ? min(e.bytes - (first_word + at.word) * 4, 4) : 0;
  };
  {
    const Words from(source, p.from.layout.scales, p.f, bytes, first_row, first_word);
    const bool same_rows = p.f.scale_lines == p.t.scale_lines;
    const uint32_t padding = padding_fill(p.to.layout.scales, p.to.spec.scale) * 0x01010101u;
    if (same_rows && holds(p.used)) {
      uint32_t held[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) held[i] = from.load(source + from.at(i).bytes, 4);
#pragma unroll
      for (int i = 0; i < kEach; ++i) tile[slot(from.at(i))] = held[i];
    } else {
#pragma unroll 4
      for (int i = 0; i < kEach; ++i) {
        const WordAt at = from.at(i);
        const int count = count_of(at, p.used);
        uint32_t v = padding;
        if (count > 0) {
          int64_t offset = at.bytes;
          // The source row that covers the same lines: grids of square blocks have fewer rows.
          if (!same_rows)
            offset = from.offset(p.f, bytes,
                                 (first_row + at.row) / static_cast<int>(p.f.scale_lines) *
                                     static_cast<int>(p.t.scale_lines),
                                 first_word + at.word);
          v = from.load(source + offset, count);
          if (count < 4) v |= padding << (8 * count);
        }
        tile[slot(at)] = v;
      }
    }
  }
  __syncthreads();
  const Words to(target, p.to.layout.scales, p.t, bytes, first_row, first_word);
  if (holds(p.padded)) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) to.store(target + to.at(i).bytes, 4, tile[slot(to.at(i))]);
  } else {
#pragma unroll 2
    for (int i = 0; i < kEach; ++i) {
      const WordAt at = to.at(i);
      const int count = count_of(at, p.padded);
      if (count > 0) to.store(target + at.bytes, count, tile[slot(at)]);
    }
  }
  __syncthreads();
}

// ---- both ----

BLOCKSCALE_HD Parts copied_parts(int64_t bytes) {
  const int64_t count = ceil_div(bytes, kRelayoutThreads * kCopied * 16);
  return {1, static_cast<int>(count), count};
}
BLOCKSCALE_HD Parts parts_of(const LayoutTraits& layout, int64_t rows, int64_t columns,
                             int64_t batch, int part_rows, int part_columns) {
  const auto down = static_cast<int>(ceil_div(round_up(rows, layout.row_multiple), part_rows));
  const auto across =
      static_cast<int>(ceil_div(round_up(columns, layout.column_multiple), part_columns));
  return {down, across, batch * down * across};
}
BLOCKSCALE_HD Parts scale_parts(const RelayoutParams& p) {
  if (p.copies_scales) return copied_parts(p.to.batch * p.t.scale_count * p.scale_bytes);
  return parts_of(p.scale_traits, ceil_div(p.t.lines, p.t.scale_lines), p.t.blocks, p.to.batch,
                  kTile, 4 * kWords / p.scale_bytes);
}
// Codes that stay as they are go as one piece, across all groups.
BLOCKSCALE_HD bool copies_codes(const RelayoutParams& p) {
  return p.from.layout.codes == p.to.layout.codes;
}
BLOCKSCALE_HD Parts code_parts(const RelayoutParams& p) {
  if (copies_codes(p)) return copied_parts(p.to.batch * p.t.code_bytes);
  return parts_of(p.code_traits, p.t.lines, p.t.line_bytes, p.to.batch, kPieceLines, kPieceBytes);
}

BLOCKSCALE_HD void find_parts(RelayoutParams& p, bool codes) {
  const auto rows = static_cast<int>(ceil_div(p.t.lines, p.t.scale_lines));
  p.used = {rows, static_cast<int>(p.t.blocks) * p.scale_bytes};
  p.padded = {
      static_cast<int>(round_up(rows, p.scale_traits.row_multiple)),
      static_cast<int>(round_up(p.t.blocks, p.scale_traits.column_multiple)) * p.scale_bytes};
  p.scales = scale_parts(p);
  p.codes = codes ? code_parts(p) : Parts{1, 1, 0};
  const auto all = static_cast<uint32_t>(p.scales.count + p.codes.count);
  p.spread = p.scales.count > 0 ? all / static_cast<uint32_t>(p.scales.count) : 1;
}
// Moves all parts; those of scales, which take longer, are spread among those of codes.
BLOCKSCALE_DEVICE void move(const RelayoutParams& p) {
  const auto of_scales = static_cast<uint32_t>(p.scales.count);
  const uint32_t all = of_scales + static_cast<uint32_t>(p.codes.count);
  for (uint32_t n = blockIdx.x; n < all; n += gridDim.x) {
    const uint32_t turn = n / p.spread, between = n - turn * p.spread;
    const bool is_scales = between == 0 && turn < of_scales;
    const uint32_t part = is_scales ? turn : n - min(turn + (between != 0), of_scales);
    if (!is_scales && copies_codes(p)) {
      copy_codes(p, part);
      continue;
    }
    if (is_scales && p.copies_scales) {
      copy_part(p.to.scales, p.from.scales, p.to.batch * p.t.scale_count * p.scale_bytes, part);
      continue;
    }
    const Parts& parts = is_scales ? p.scales : p.codes;
    const uint32_t row = part / parts.across;
    const auto batch = static_cast<int>(row / parts.down), r = static_cast<int>(row % parts.down);
    const auto c = static_cast<int>(part % parts.across);
    is_scales ? move_scales(p, batch, r, c) : move_codes(p, batch, r, c);
  }
}

template <bool kGrouped>
__global__ void __launch_bounds__(kRelayoutThreads, kGrouped ? 2 : 4)
    relayout_kernel(const __grid_constant__ RelayoutParams given) {
  after_previous(given);
  if (blockIdx.x == 0 && blockIdx.y == 0)
    for (int64_t i = threadIdx.x; i < given.outers; i += kRelayoutThreads)
      given.to.outer[i] = given.from.outer[i];
  if constexpr (!kGrouped) {
    move(given);
  } else {
    if (copies_codes(given) && blockIdx.y == 0)
      for (int64_t i = blockIdx.x; i < given.codes.count; i += gridDim.x) copy_codes(given, i);
    for (int g = static_cast<int>(blockIdx.y); g < given.plan.count;
         g += static_cast<int>(gridDim.y)) {
      RelayoutParams p = given;
      enter_group(p, g);
      find_parts(p, !copies_codes(p));
      move(p);
    }
  }
}

}  // namespace

void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  RelayoutParams p{};
  p.from = from, p.to = to, p.f = from.shape(), p.t = to.shape();
  p.outers = to.spec.outer ? to.matrices() : 0;
  p.scale_bytes = scale_bytes(to.spec.scale);
  p.code_traits = traits(to.layout.codes), p.scale_traits = traits(to.layout.scales);
  // Scales are copied as they lie if they keep their places, in whole halves of chunks.
  const int64_t bytes = to.batch * p.t.scale_count * p.scale_bytes;
  const auto places = reinterpret_cast<uintptr_t>(from.scales) |
                      reinterpret_cast<uintptr_t>(to.scales) | static_cast<uintptr_t>(bytes);
  p.copies_scales = !to.groups && from.layout.scales == Layout::linear &&
                    to.layout.scales == Layout::linear && p.f.scale_lines == p.t.scale_lines &&
                    places % 8 == 0;
  find_parts(p, true);
  const int64_t parts = p.scales.count + p.codes.count;
  if (parts == 0 && p.outers == 0 && !to.groups) return;
  if (!to.groups) {
    start(relayout_kernel<false>, static_cast<unsigned>(std::max<int64_t>(parts, 1)),
          kRelayoutThreads, 0, native(stream), p);
    return check_launch("relayout");
  }
  const ConstQuantized target = as_const(to);
  p.plan = make_plan(to.groups, to.rows, to.columns, &from, &target, false, stream);
  const int64_t groups = std::min<int64_t>(to.groups.count, 1 << 15);
  const dim3 grid(static_cast<unsigned>(ceil_div(std::max<int64_t>(parts, 1), groups)),
                  static_cast<unsigned>(groups));
  start(relayout_kernel<true>, grid, kRelayoutThreads, 0, native(stream), p);
  Side side{};
  side.out = to;
  side.shape = p.t;
  p.plan.side[0] = nullptr;  // the source needs no filling
  fill_groups({}, side, p.plan, stream);
  check_launch("relayout");
}

}  // namespace blockscale::gpu
