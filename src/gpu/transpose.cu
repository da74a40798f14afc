// An operand in square blocks, transposed to the other axis.
#include "gpu/launch.h"
#include "transposed.h"

namespace blockscale::gpu {
namespace {

constexpr int kTransposeThreads = 256;
constexpr int kSide = 128;        // codes of a tile, along either axis
constexpr int kChunk = 8;         // bytes of a line that move together; lines are multiples of it
constexpr int kScalesOfOne = 16;  // per thread

struct TransposeParams {
  ConstQuantized from;
  Quantized to;
  StoredShape f, t;
  int scale_bytes;
  int64_t padded_columns;  // of the scales of `to`, with the padding of its layout
  int64_t across;          // tiles side by side along the lines of `from`
  int64_t code_parts;      // tiles of codes per matrix; those of scales follow
  int64_t parts;           // of both
};

// A tile of codes as lines of bytes. The pitch is an odd number of words, so that neighbouring
// lines lie in different banks.
template <int kPerByte>
struct Tile {
  static constexpr int kBytes = kSide / kPerByte, kPitch = kBytes + 4;
  static constexpr int kChunks = kBytes / kChunk;  // per line
  alignas(8) uint8_t bytes[kSide * kPitch];
};

template <int kPerByte>
BLOCKSCALE_DEVICE void load(Tile<kPerByte>& tile, const TransposeParams& p, const uint8_t* codes,
                            int64_t line, int64_t byte) {
  using T = Tile<kPerByte>;
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < kSide * T::kChunks; i += kTransposeThreads) {
    const int row = i / T::kChunks, chunk = i % T::kChunks * kChunk;
    const bool there = line + row < p.f.lines && byte + chunk < p.f.line_bytes;
    uint2 v{};
    if (there)
      v = *reinterpret_cast<const uint2*>(codes + (line + row) * p.f.line_bytes + byte + chunk);
    auto* to = reinterpret_cast<uint32_t*>(tile.bytes + row * T::kPitch + chunk);
    to[0] = v.x, to[1] = v.y;
  }
}

// Stores the same tile as lines of `to`, from byte `byte` of its line `line` on. A warp writes 32
// bytes of eight lines, or of eight pairs of lines whose codes share bytes.
template <int kPerByte>
BLOCKSCALE_DEVICE void store(const Tile<kPerByte>& tile, const TransposeParams& p, uint8_t* codes,
                             int64_t line, int64_t byte) {
  using T = Tile<kPerByte>;
  constexpr int kTogether = 4;               // chunks per line
  constexpr int kLines = kChunk * kPerByte;  // lines of `from` that make up a chunk of `to`
#pragma unroll
  for (int i = static_cast<int>(threadIdx.x); i < T::kBytes * kSide / kLines;
       i += kTransposeThreads) {
    const int chunk = i % kTogether + i / (kTogether * T::kBytes) * kTogether;
    const int column = i / kTogether % T::kBytes;
    const uint8_t* from = tile.bytes + chunk * kLines * T::kPitch + column;
    uint64_t low = 0, high = 0;
#pragma unroll
    for (int j = 0; j < kLines; ++j) {
      const uint64_t v = from[j * T::kPitch];
      if constexpr (kPerByte == 1) {
        low |= v << (8 * j);
      } else {
        low |= (v & 15) << (4 * j);
        high |= (v >> 4) << (4 * j);
      }
    }
    const int64_t to_byte = byte + chunk * kChunk, to_line = line + column * kPerByte;
    if (to_byte >= p.t.line_bytes) continue;
    uint8_t* to = codes + to_line * p.t.line_bytes + to_byte;
    if (to_line < p.t.lines) *reinterpret_cast<uint64_t*>(to) = low;
    if (kPerByte == 2 && to_line + 1 < p.t.lines)
      *reinterpret_cast<uint64_t*>(to + p.t.line_bytes) = high;
  }
}

BLOCKSCALE_DEVICE void move_scales(const TransposeParams& p, int64_t batch, int64_t part) {
  const int bytes = p.scale_bytes;
  const uint8_t* from = p.from.scales + batch * p.f.scale_count * bytes;
  uint8_t* to = p.to.scales + batch * p.t.scale_count * bytes;
  for (int i = 0; i < kScalesOfOne; ++i) {
    const int64_t at = (part * kScalesOfOne + i) * kTransposeThreads + threadIdx.x;
    if (at >= p.t.scale_count) return;
    const int64_t row = at / p.padded_columns, column = at % p.padded_columns;
    const int64_t target =
        layout_offset(p.to.layout.scales, p.t.scale_rows, p.t.scale_columns, row, column);
    const int64_t source = transposed_scale(p.from.layout, p.f, p.t, p.to.spec.block, row, column);
    if (bytes == 4)
      reinterpret_cast<uint32_t*>(to)[target] =
          source < 0 ? 0 : reinterpret_cast<const uint32_t*>(from)[source];
    else
      to[target] = source < 0 ? padding_fill(p.to.layout.scales, p.to.spec.scale) : from[source];
  }
}

template <int kPerByte>
__global__ void __launch_bounds__(kTransposeThreads)
    transpose_kernel(const __grid_constant__ TransposeParams p) {
  after_previous();
  __shared__ Tile<kPerByte> tile;
  const int64_t batch = blockIdx.x / p.parts, part = blockIdx.x % p.parts;
  if (part == 0 && threadIdx.x == 0 && p.to.spec.outer) p.to.outer[batch] = p.from.outer[batch];
  if (part >= p.code_parts) return move_scales(p, batch, part - p.code_parts);
  const int64_t down = part / p.across * kSide, across = part % p.across * kSide;
  load(tile, p, p.from.codes + batch * p.f.code_bytes, down, across / kPerByte);
  __syncthreads();
  store(tile, p, p.to.codes + batch * p.t.code_bytes, across, down / kPerByte);
}

}  // namespace

void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream) {
  TransposeParams p{};
  p.from = from, p.to = to, p.f = from.shape(), p.t = to.shape();
  p.scale_bytes = scale_bytes(to.spec.scale);
  p.padded_columns = padded_columns(to.layout.scales, p.t.scale_columns);
  p.across = ceil_div(p.f.padded, kSide);
  p.code_parts = ceil_div(p.t.padded, kSide) * p.across;
  // At least one, for the outer scale.
  p.parts = std::max<int64_t>(
      p.code_parts + ceil_div(p.t.scale_count, int64_t{kTransposeThreads} * kScalesOfOne), 1);
  if (to.batch == 0) return;
  if (p.parts * to.batch >= kGpuLimit)
    fail("transpose", "from", std::to_string(to.batch) + " matrices",
         "fewer than 2^31 tiles of 128 x 128 and parts of scales", "transpose parts of the batch");
  start(codes_per_byte(to.spec.element) == 1 ? transpose_kernel<1> : transpose_kernel<2>,
        static_cast<unsigned>(p.parts * to.batch), kTransposeThreads, 0, native(stream), p);
  check_launch("transpose");
}

}  // namespace blockscale::gpu
