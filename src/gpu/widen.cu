// MXFP4 operands as FP8 ones, as widen.h says.
#include <bit>
#include <string>
#include <utility>

#include "divisor.h"
#include "gpu/groups/groups.h"
#include "gpu/launch.h"
#include "gpu/quantize/encode.h"

namespace blockscale::gpu {
namespace {

constexpr int kWidenThreads = 256, kWidenLines = kWidenThreads / 32;
constexpr int kBlock = kMxfp4.block;
constexpr int kCodes = 16;          // per lane at once: half a block
constexpr int kStep = 32 * kCodes;  // per warp
constexpr int kAhead = 4;           // steps whose loads are in flight together
constexpr int kTogether = kStep * kAhead;
static_assert(kMostWidened == kGpuLimit - kTogether);  // steps are counted past a line's end
constexpr int kShared = kWidened.block;  // codes of A that share a scale; side of B's squares

struct WidenSide {
  const uint8_t *codes, *scales;
  uint8_t* to;
  float* to_scales;
  int code_columns, scale_columns;  // of a line
  int64_t scale_matrix;             // scales per matrix of the batch
  int64_t to_scale_matrix;          // and per matrix of the result
  int pitch;                        // of a line of `to_scales`
  int scale_shift;                  // log2 of the lines that share a row of scales
  uint32_t lines;                   // of all matrices
  Divisor matrix;                   // lines of one matrix
};
struct WidenParams {
  WidenSide a, b;
  float* line_scales;  // of B
  uint32_t a_blocks;   // thread blocks with lines of A
  int blocks, padded;  // per line: blocks of 32; bytes of the result
  // Those that divide `rows` of the contraction axis, if any, each in whole multiples of `unit`.
  Groups groups;
  int rows, unit;
};

// A part of a line, in blocks and in bytes of the result.
struct Span {
  int first, blocks, to, bytes;
};
// The part that belongs to a group, or the whole line. Called by a whole warp. Where offsets are
// wrong no group has rows, so that everything stays within the line.
BLOCKSCALE_DEVICE Span span_of(const WidenParams& p, int group) {
  if (!p.groups) return {0, p.blocks, 0, p.padded};
  Span span{};
  uint32_t wrong = 0;
#pragma unroll 1
  for (int base = 0; base < static_cast<int>(p.groups.count); base += 32) {
    const WarpEnds ends(p.groups, base, p.rows);
    const int g = base + static_cast<int>(threadIdx.x) % 32, rows = ends.end - ends.begin;
    const int blocks = round_up_by(rows, p.unit - 1) / kBlock;
    const int bytes = round_up_by(rows, kShared - 1);
    wrong |= ends.wrong;
    if (g < group) span.first += blocks, span.to += bytes;
    if (g == group) span.blocks = blocks, span.bytes = bytes;
  }
  if (warp_max(wrong)) return {};
  const auto sum = [](int n) { return static_cast<int>(warp_sum(static_cast<uint32_t>(n))); };
  return {sum(span.first), sum(span.blocks), sum(span.to), sum(span.bytes)};
}

// By one warp; a lane takes half a block at a time. kWhole: all blocks share `top`, the largest of
// their scales; else every 128 codes share the largest of theirs.
template <bool kWhole>
BLOCKSCALE_DEVICE void widen_codes(const uint8_t* codes, const uint8_t* scales, const Span& span,
                                   uint32_t top, uint8_t* to, float* to_scales, int pitch) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  for (int first = 0; first < span.bytes; first += kAhead * kStep) {
    uint2 loaded[kAhead];
    uint32_t scale[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int half = (first + i * kStep) / kCodes + lane;
      const bool there = half < 2 * span.blocks;
      loaded[i] = there ? load_once(reinterpret_cast<const uint2*>(codes) + half) : uint2{0, 0};
      scale[i] = there ? load_once(scales + half / 2) : 0;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int c = first + i * kStep + lane * kCodes;
      uint32_t shared = top;
      if constexpr (!kWhole) {
        shared = top_of(scale[i]);
        shared = max(shared, shuffle_xor(shared, 2));
        shared = max(shared, shuffle_xor(shared, 4));
      }
      if (c >= span.bytes) continue;
      const Codes made = widen_run({{loaded[i].x, loaded[i].y}}, scale[i], shared);
      store_vector(to + c, {made.word[0], made.word[1], made.word[2], made.word[3]});
      if (!kWhole && c % kShared == 0)
        to_scales[static_cast<int64_t>(c / kShared) * pitch] = widened_scale(shared);
    }
  }
}

// One warp per line and group (blockIdx.y).
__global__ void __launch_bounds__(kWidenThreads)
    widen_kernel(const __grid_constant__ WidenParams p) {
  after_previous(p);
  const bool is_b = blockIdx.x >= p.a_blocks;
  const WidenSide& side = is_b ? p.b : p.a;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = static_cast<int>(blockIdx.y);
  const uint32_t all = (blockIdx.x - (is_b ? p.a_blocks : 0)) * kWidenLines + threadIdx.x / 32;
  if (all >= side.lines) return;
  uint32_t line = all;
  const uint32_t matrix = side.matrix.divide(line);
  const Span span = span_of(p, group);
  const uint8_t* codes = side.codes + static_cast<int64_t>(all) * side.code_columns +
                         int64_t{span.first} * (kBlock / 2);
  const uint8_t* scales = side.scales + matrix * side.scale_matrix + span.first +
                          static_cast<int64_t>(line >> side.scale_shift) * side.scale_columns;
  uint8_t* to = side.to + static_cast<int64_t>(all) * p.padded + span.to;
  float* to_scales = side.to_scales + matrix * side.to_scale_matrix;
  const bool last = line == static_cast<uint32_t>(side.matrix.by()) - 1;
  const auto row_of_scales = static_cast<int>(is_b ? line / kShared : line);
  if (group == 0 && last)
    for (int i = lane; i < p.padded / kShared; i += 32)
      for (int row = row_of_scales + 1; row < side.pitch; ++row)
        to_scales[static_cast<int64_t>(i) * side.pitch + row] = 0;
  if (!is_b) {
    to_scales += static_cast<int64_t>(span.to / kShared) * side.pitch + line;
    return widen_codes<false>(codes, scales, span, 0, to, to_scales, side.pitch);
  }
  if (group == 0 && line % kShared == 0)
    for (int i = lane; i < p.padded / kShared; i += 32)
      to_scales[static_cast<int64_t>(i) * side.pitch + row_of_scales] = 1;
  uint32_t top = 0;
  for (int block = lane; block < span.blocks; block += 32) top = max(top, top_of(scales[block]));
  top = warp_max(top);
  if (lane == 0) p.line_scales[static_cast<int64_t>(group) * side.lines + all] = widened_scale(top);
  widen_codes<true>(codes, scales, span, top, to, nullptr, 0);
}

// An operand with room for its codes and scales, and what the kernel needs to know about it. `take`
// allocates memory, in multiples of 16 bytes.
struct Room {
  // `take` is asked for the codes' memory, then for that of the scales. `op` is the operator that
  // an error names.
  template <class Take>
  Room(const char* op, const ConstQuantized& from, const QuantSpec& spec, const Take& take)
      : made{from} {
    const StoredShape s = from.shape();
    ConstQuantized& q = made.q;
    q.spec = spec;
    q.spec.element = Format::e5m2;
    q.layout.scales = Layout::mn_major;
    // Tails that a transform filled are codes like any others; groups along the contraction axis
    // have whole blocks of them anyway.
    if (from.axis == -1 || !from.groups) q.axis = -1, q.rows = s.lines, q.columns = s.extent;
    const StoredShape m = q.shape();
    if (m.padded > kMostWidened)
      fail(op, "k", s.extent, "at most " + std::to_string(kMostWidened) + " for MXFP4 on a GPU",
           "multiply parts of it, and add up");
    padded = static_cast<int>(m.padded);
    side.to = take(q.batch * s.lines * padded);
    uint8_t* const to_scales = take(q.batch * m.scale_count * 4);
    side.to_scales = reinterpret_cast<float*>(to_scales);
    q.codes = side.to, q.scales = to_scales;
    side.codes = from.codes, side.scales = from.scales;
    side.code_columns = static_cast<int>(s.code_columns);
    side.scale_columns = static_cast<int>(s.scale_columns);
    side.scale_matrix = s.scale_count, side.to_scale_matrix = m.scale_count;
    side.pitch = static_cast<int>(padded_rows(Layout::mn_major, m.scale_rows));
    side.scale_shift = s.scale_lines == 1 ? 0 : std::countr_zero(uint32_t{kBlock});
    side.lines = static_cast<uint32_t>(from.batch * s.lines);
    side.matrix = Divisor(std::max<int64_t>(s.lines, 1));
    blocks = static_cast<int>(s.blocks);
  }
  WidenedOperand made;
  WidenSide side{};
  int padded, blocks;  // per line: bytes of the result, blocks of 32
};
auto from_workspace(const Stream& stream) {
  return [&stream](int64_t bytes) { return static_cast<uint8_t*>(stream.workspace(bytes)); };
}
// The same with scales of its lines, for each of the groups along the contraction axis.
template <class Take>
Room room_of_b(const ConstQuantized& b, int groups, const Take& take) {
  Room room("gemm", b, kFp8_128x128, take);
  room.made.line_scales = reinterpret_cast<float*>(take(int64_t{4} * groups * room.side.lines));
  return room;
}
// Takes from memory that starts at `memory`, one piece behind the other; `end` advances.
auto from(uint8_t* memory, int64_t& end) {
  return [memory, &end](int64_t bytes) { return memory + std::exchange(end, end + bytes); };
}

// For operands that groups along the contraction axis divide, if any. Returns how many parts their
// lines have.
int set_groups(WidenParams& p, const ConstQuantized& q) {
  if (q.axis != -2 || q.groups.count == 0) return 1;
  p.groups = q.groups, p.rows = static_cast<int>(q.rows), p.unit = q.spec.unit();
  return static_cast<int>(q.groups.count);
}

// Launches for the operands that are given.
void launch(const char* op, WidenParams& p, const Room* a, const Room* b, const Stream& stream) {
  const Room& one = a ? *a : *b;
  p.blocks = one.blocks, p.padded = one.padded;
  if (a) p.a = a->side;
  if (b) p.b = b->side, p.line_scales = const_cast<float*>(b->made.line_scales);
  p.a_blocks = static_cast<uint32_t>(ceil_div(p.a.lines, kWidenLines));
  const auto blocks = p.a_blocks + static_cast<uint32_t>(ceil_div(p.b.lines, kWidenLines));
  if (blocks == 0) return;
  const dim3 grid(blocks, p.groups ? static_cast<unsigned>(p.groups.count) : 1);
  start(widen_kernel, grid, kWidenThreads, 0, native(stream), p);
  check_launch(op);
}

}  // namespace

WidenedPair widen(const ConstQuantized& a, const ConstQuantized& b, const Stream& stream) {
  WidenParams p{};
  const int parts = set_groups(p, b);
  const Room left("gemm", a, kWidened, from_workspace(stream));
  const Room right = room_of_b(b, parts, from_workspace(stream));
  launch("gemm", p, &left, &right, stream);
  return {left.made, right.made};
}

void widen_to(const ConstQuantized& a, const Quantized& to, const Stream& stream) {
  WidenParams p{};
  set_groups(p, a);
  uint8_t* const parts[] = {to.codes, to.scales};
  int next = 0;
  const Room room("quantize", a, kWidened, [&](int64_t) { return parts[next++]; });
  launch("quantize", p, &room, nullptr, stream);
}

WidenedOperand widen_right(const ConstQuantized& b, const Stream& stream) {
  WidenParams p{};
  const int parts = set_groups(p, b);
  const Room room = room_of_b(b, parts, from_workspace(stream));
  launch("gemm", p, nullptr, &room, stream);
  return room.made;
}

int64_t widened_bytes(const ConstQuantized& b) {
  int64_t bytes = 0;
  room_of_b(b, 1, [&](int64_t more) {
    bytes += more;
    return static_cast<uint8_t*>(nullptr);
  });
  return bytes;
}

WidenedOperand widened_in(const ConstQuantized& b, uint8_t* memory) {
  int64_t end = 0;
  return room_of_b(b, 1, from(memory, end)).made;
}

WidenedOperand widen_right(const ConstQuantized& b, uint8_t* memory, const Stream& stream) {
  WidenParams p{};
  int64_t end = 0;
  const Room room = room_of_b(b, 1, from(memory, end));
  launch("gemm", p, nullptr, &room, stream);
  return room.made;
}

}  // namespace blockscale::gpu
