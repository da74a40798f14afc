// MXFP4 operands as FP8 ones, for GPUs whose tensor cores read FP8 but not FP4.
//
// An E2M1 code has two significant bits; E5M2 has three, and enough powers of two for a factor of
// 2^28 between the scales of two blocks. So blocks of 32 with a scale each become, exactly, a line
// (or 128 codes of it) with one scale, with E5M2 codes that absorb the differences between the
// blocks' scales.
#include <bit>
#include <utility>

#include "divisor.h"
#include "gpu/launch.h"
#include "gpu/port.h"

namespace blockscale::gpu {
namespace {

constexpr int kWidenThreads = 256, kWidenLines = kWidenThreads / 32;
constexpr int kBlock = 32;
constexpr int kCodes = 16;          // per lane at once: half a block
constexpr int kStep = 32 * kCodes;  // per warp
constexpr int kAhead = 4;           // steps whose loads are in flight together
constexpr int64_t kMostCodes = kGpuLimit - kStep * kAhead;  // of a line
constexpr int kShared = 128;  // codes of A that share a scale; side of B's squares
constexpr uint32_t kNanScale = traits(Format::e8m0).magnitude_mask();
constexpr int kScaleBias = traits(Format::e8m0).bias;
template <uint32_t kCode>
constexpr float kMagnitude = decode(Format::e2m1, kCode);
// Codes of a block with the largest scale are multiplied by 2^13: 6 * 2^13 fits in E5M2, 6 * 2^14
// does not.
constexpr int kTop = 13;

struct WideSide {
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
  WideSide a, b;
  float* line_scales;      // of B
  uint32_t a_blocks;       // thread blocks with lines of A
  int blocks, padded;      // per line: blocks of 32; bytes of the result
  int groups = 1;          // along the contraction axis
  const int32_t* ends;     // where groups end in the lines of codes, or null
  const int32_t* to_ends;  // and in the lines of the result
};

// A group's part of a line, in blocks and in bytes of the result.
struct Span {
  int first, blocks, to, bytes;
  BLOCKSCALE_DEVICE Span(const WidenParams& p, int group)
      : first(0), blocks(p.blocks), to(0), bytes(p.padded) {
    if (!p.ends) return;
    if (group > 0) first = p.ends[group - 1] / kBlock, to = p.to_ends[group - 1];
    blocks = p.ends[group] / kBlock - first, bytes = p.to_ends[group] - to;
  }
};

// 2^e, or 0 where it is too small for FP32.
BLOCKSCALE_DEVICE float power_of_two(int e) { return e < -149 ? 0.0f : exp2i(e); }
// The factor for codes whose blocks have scales of up to `top`.
BLOCKSCALE_DEVICE float scale_of(uint32_t top) {
  return power_of_two(static_cast<int>(top) - kScaleBias - kTop);
}

// The eight E2M1 magnitudes as a block's E5M2 codes, one per byte.
struct Magnitudes {
  uint32_t low, high;
  BLOCKSCALE_DEVICE Magnitudes(uint32_t scale, uint32_t top) {
    const int less = static_cast<int>(top) - static_cast<int>(scale);
    const float f = scale == kNanScale ? bit_cast<float>(kNanBits) : power_of_two(kTop - less);
    low =
        to_fp8x4<true>(kMagnitude<0> * f, kMagnitude<1> * f, kMagnitude<2> * f, kMagnitude<3> * f);
    high =
        to_fp8x4<true>(kMagnitude<4> * f, kMagnitude<5> * f, kMagnitude<6> * f, kMagnitude<7> * f);
  }
  // Eight four-bit codes become two words of four bytes.
  BLOCKSCALE_DEVICE void of_8(uint32_t codes, uint32_t* to) const {
    const uint32_t which = codes & 0x77777777;
    // Signs of even codes are in place after shifting them up by four bits.
    const uint32_t even = codes << 4;
    to[0] = permute_bytes(low, high, which & 0xFFFF) |
            (permute_bytes(even, codes, 0x5140) & 0x80808080);
    to[1] =
        permute_bytes(low, high, which >> 16) | (permute_bytes(even, codes, 0x7362) & 0x80808080);
  }
};

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
        shared = scale[i] == kNanScale ? 0 : scale[i];
        shared = max(shared, shuffle_xor(shared, 2));
        shared = max(shared, shuffle_xor(shared, 4));
      }
      if (c >= span.bytes) continue;
      const Magnitudes magnitudes(scale[i], shared);
      uint32_t made[4];
      magnitudes.of_8(loaded[i].x, made);
      magnitudes.of_8(loaded[i].y, made + 2);
      store_vector(to + c, {made[0], made[1], made[2], made[3]});
      if (!kWhole && c % kShared == 0)
        to_scales[static_cast<int64_t>(c / kShared) * pitch] = scale_of(shared);
    }
  }
}

// One warp per line.
__global__ void __launch_bounds__(kWidenThreads)
    widen_kernel(const __grid_constant__ WidenParams p) {
  after_previous(p);
  const bool is_b = blockIdx.x >= p.a_blocks;
  const WideSide& side = is_b ? p.b : p.a;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const uint32_t all = (blockIdx.x - (is_b ? p.a_blocks : 0)) * kWidenLines + threadIdx.x / 32;
  if (all >= side.lines) return;
  uint32_t line = all;
  const uint32_t matrix = side.matrix.divide(line);
  const uint8_t* codes = side.codes + static_cast<int64_t>(all) * side.code_columns;
  const uint8_t* scales = side.scales + matrix * side.scale_matrix +
                          static_cast<int64_t>(line >> side.scale_shift) * side.scale_columns;
  uint8_t* to = side.to + static_cast<int64_t>(all) * p.padded;
  float* to_scales = side.to_scales + matrix * side.to_scale_matrix;
  if (is_b && line % kShared == 0)
    for (int i = lane; i < p.padded / kShared; i += 32)
      to_scales[static_cast<int64_t>(i) * side.pitch + line / kShared] = 1;
  for (int group = 0; group < p.groups; ++group) {
    const Span span(p, group);
    const uint8_t* from = codes + static_cast<int64_t>(span.first) * (kBlock / 2);
    if (!is_b) {
      widen_codes<false>(from, scales + span.first, span, 0, to + span.to,
                         to_scales + static_cast<int64_t>(span.to / kShared) * side.pitch + line,
                         side.pitch);
      continue;
    }
    uint32_t top = 0;
    for (int block = lane; block < span.blocks; block += 32) {
      const uint32_t scale = scales[span.first + block];
      top = max(top, scale == kNanScale ? 0 : scale);
    }
    top = warp_max(top);
    if (lane == 0) p.line_scales[static_cast<int64_t>(group) * side.lines + all] = scale_of(top);
    widen_codes<true>(from, scales + span.first, span, top, to + span.to, nullptr, 0);
  }
}

// An operand with room for its codes and scales, and what the kernel needs to know about it. `take`
// allocates memory, in multiples of 16 bytes.
struct Room {
  template <class Take>
  Room(const ConstQuantized& from, const QuantSpec& spec, const Take& take) : made{from} {
    const StoredShape s = from.shape();
    ConstQuantized& q = made.q;
    q.spec = spec;
    q.spec.element = Format::e5m2;
    q.layout.scales = Layout::mn_major;
    // Tails that a transform filled are codes like any others; groups along the contraction axis
    // have whole blocks of them anyway.
    if (from.axis == -1 || !from.groups) q.axis = -1, q.rows = s.lines, q.columns = s.extent;
    const StoredShape m = q.shape();
    if (m.padded > kMostCodes)
      fail("gemm", "k", s.extent, "at most 2^31 - 2048 for MXFP4 on a GPU",
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
  Wide made;
  WideSide side{};
  int padded, blocks;  // per line: bytes of the result, blocks of 32
};
Room room_of_a(const ConstQuantized& a, const Stream& stream) {
  return {a, kFp8_1x128,
          [&](int64_t bytes) { return static_cast<uint8_t*>(stream.workspace(bytes)); }};
}
// The same with scales of its lines, for each of the groups along the contraction axis.
template <class Take>
Room room_of_b(const ConstQuantized& b, int groups, const Take& take) {
  Room room(b, kFp8_128x128, take);
  room.made.line_scales = reinterpret_cast<float*>(take(int64_t{4} * groups * room.side.lines));
  return room;
}
// Takes from memory that starts at `memory`, one piece behind the other; `end` advances.
auto from(uint8_t* memory, int64_t& end) {
  return [memory, &end](int64_t bytes) { return memory + std::exchange(end, end + bytes); };
}

// Where groups along the contraction axis end, in storage where each starts at a multiple of
// `unit`.
const int32_t* ends_of(const ConstQuantized& q, int64_t unit, const Stream& stream) {
  auto* ends = static_cast<int32_t*>(stream.workspace((q.groups.count + 1) * 4));
  group_ends(q.groups, q.rows, unit, ends, ends + q.groups.count, stream);
  return ends;
}

// Launches for the operands that are given.
void launch(WidenParams& p, const Room* a, const Room* b, const Stream& stream) {
  const Room& one = a ? *a : *b;
  p.blocks = one.blocks, p.padded = one.padded;
  if (a) p.a = a->side;
  if (b) p.b = b->side, p.line_scales = const_cast<float*>(b->made.line_scales);
  p.a_blocks = static_cast<uint32_t>(ceil_div(p.a.lines, kWidenLines));
  const auto blocks = p.a_blocks + static_cast<uint32_t>(ceil_div(p.b.lines, kWidenLines));
  if (blocks == 0) return;
  start(widen_kernel, blocks, kWidenThreads, 0, native(stream), p);
  check_launch("gemm");
}

}  // namespace

Widened widen(const ConstQuantized& a, const ConstQuantized& b, const Stream& stream) {
  WidenParams p{};
  if (b.groups && a.groups.count > 0) {
    p.groups = static_cast<int>(a.groups.count);
    p.ends = ends_of(a, a.spec.unit(), stream);
    p.to_ends = ends_of(a, kShared, stream);
  }
  const Room left = room_of_a(a, stream);
  const Room right = room_of_b(
      b, p.groups, [&](int64_t bytes) { return static_cast<uint8_t*>(stream.workspace(bytes)); });
  launch(p, &left, &right, stream);
  return {left.made, right.made};
}

Wide widen_a(const ConstQuantized& a, const Stream& stream) {
  WidenParams p{};
  const Room room = room_of_a(a, stream);
  launch(p, &room, nullptr, stream);
  return room.made;
}

int64_t wide_bytes(const ConstQuantized& b) {
  int64_t bytes = 0;
  room_of_b(b, 1, [&](int64_t more) {
    bytes += more;
    return static_cast<uint8_t*>(nullptr);
  });
  return bytes;
}

Wide wide_in(const ConstQuantized& b, uint8_t* memory) {
  int64_t end = 0;
  return room_of_b(b, 1, from(memory, end)).made;
}

Wide widen_b(const ConstQuantized& b, uint8_t* memory, const Stream& stream) {
  WidenParams p{};
  int64_t end = 0;
  const Room room = room_of_b(b, 1, from(memory, end));
  launch(p, nullptr, &room, stream);
  return room.made;
}

}  // namespace blockscale::gpu
