// Quantize and amax. A matrix is cut into tiles; on each tile, a pass for every requested direction
// finds the block amaxes, turns them into scales, encodes the elements into line-major codes in
// scratch, and stores codes and scales in the requested layout.
#include "cpu/cpu.h"
#include "cpu/direction.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/quantize.cc"
#include "hwy/foreach_target.h"
//
#include <algorithm>
#include <atomic>

#include "cpu/byte-inl.h"
#include "cpu/codec-inl.h"
#include "cpu/e2m1-inl.h"
#include "cpu/fp32-inl.h"
#include "cpu/pack-inl.h"
#include "cpu/scales-inl.h"
#include "cpu/store-inl.h"
#include "cpu/walk-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// ---- along rows ----

// All codes of a tile, kept in the space for its transformed values.
HWY_INLINE uint8_t* kept_codes(Scratch& scratch) {
  return reinterpret_cast<uint8_t*>(scratch.transformed);
}

// Whether elements may be encoded from BF16 bits; if so, the scales of a tile's blocks decide.
HWY_INLINE bool may_be_narrow(const Direction& d, int64_t batch) {
  const QuantSpec& spec = d.out.spec;
  if (spec.element == Format::e2m1)
    return !d.thresholds.empty() && d.tensor_thresholds(batch).holds;
  return spec.scale == Format::e8m0 && !spec.stochastic() && traits(spec.element).bits() == 8;
}

// row_pass() from BF16 bits; returns false, having stored nothing, if that is not possible.
HWY_INLINE bool narrow_rows(const Direction& d, const TileView<uint16_t>& x, const TileArea& area,
                            bool keep, Encoded e, Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const int lines = spec.block_lines();
  const int64_t blocks = x.columns / spec.block;
  const int64_t count = ceil_div(x.rows, lines) * blocks;
  auto* amax = reinterpret_cast<uint16_t*>(scratch.work);
  row_maxima(x, spec.block, lines, amax);
  if (!narrow_scales(spec, d.tensor_scale(area.batch), amax, count, scratch.scale_codes,
                     scratch.scale_values))
    return false;
  if (keep) std::copy_n(scratch.scale_codes, count, scratch.stored);
  e.scale_bytes = scratch.scale_codes;
  e.scale_pitch = blocks;
  const LineStore store_lines(d, e, false);
  const auto encode = [&](const auto& rows) HWY_ATTR {
    for (int64_t r = 0; r < (keep ? x.rows : area.rows); ++r) {
      uint8_t* codes = keep ? kept_codes(scratch) + r * e.pitch : scratch.codes;
      rows.encode(x.data + r * x.stride, x.columns, r / lines * blocks, codes, scratch.ahead);
      store_lines(r, r + 1, codes, scratch);
    }
  };
  with_mantissa_bits(spec.element, [&](auto m) HWY_ATTR {
    if constexpr (m == 1)
      encode(RowThresholds(ThresholdLookup(d.tensor_thresholds(area.batch)), scratch.scale_values,
                           count, spec.block, scratch));
    else
      encode(ByteRows<m>(ByteEncoder<m>(spec.element), scratch.scale_values, spec.block));
  });
  return true;
}

// `keep`: leave all codes in kept_codes(). Returns whether any block is not finite.
template <class T>
HWY_INLINE bool row_pass(const Direction& d, const TileView<T>& x, const TileArea& area, bool keep,
                         Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const int lines = spec.block_lines();
  const int64_t blocks = x.columns / spec.block;
  const int64_t groups = ceil_div(x.rows, lines);
  const Encoded e{.batch = area.batch,
                  .line = area.row,
                  .lines = area.rows,
                  .pos = area.column,
                  .positions = x.columns,
                  .pitch = x.columns / codes_per_byte(spec.element),
                  .group_step = blocks,
                  .block_step = 1};
  if constexpr (std::is_same_v<T, uint16_t>)
    if (may_be_narrow(d, area.batch) && narrow_rows(d, x, area, keep, e, scratch)) return false;
  row_amaxes(x, spec.block, lines, reinterpret_cast<BitsOf<T>*>(scratch.work), scratch.amax);
  const bool has_bad = block_scales(spec, d.tensor_scale(area.batch), d.tensor_finite(area.batch),
                                    scratch.amax, groups * blocks, scratch.stored, scratch.inv);
  const bool within = is_within<T>(spec);
  with_mantissa_bits(spec.element, [&](auto m) HWY_ATTR {
    const Encoder<m> encoder(spec.element);
    const Signs signs(spec.element);
    for (int64_t r = 0; r < (keep ? x.rows : area.rows); ++r) {
      const T* line = x.data + r * x.stride;
      const float* inv = scratch.inv + r / lines * blocks;
      uint8_t* codes = keep ? kept_codes(scratch) + r * e.pitch : scratch.codes;
      if (spec.stochastic()) {
        random_line(d, d.global_line(area.batch, area.row + r), area.column, x.columns,
                    scratch.random);
        encode_row<m, true>(encoder, signs, line, x.columns, spec.block, inv, scratch.random, codes,
                            scratch.ahead);
      } else if (within) {
        encode_row_within<m>(encoder, signs, reinterpret_cast<const uint16_t*>(line), x.columns,
                             spec.block, inv, codes, scratch.ahead);
      } else {
        encode_row<m, false>(encoder, signs, line, x.columns, spec.block, inv, nullptr, codes,
                             scratch.ahead);
      }
      store(d, e, r, r + 1, has_bad, codes, scratch);
    }
  });
  return has_bad;
}

// ---- down columns ----

// The scales of a tile of blocks down columns, kTileSide / 16 bytes per column: gathering them one
// by one would take a third as long as the encoding. May read and write 64 columns at a time.
HWY_INLINE const uint8_t* scales_by_column(const uint8_t* codes, int64_t columns, uint8_t* out) {
  constexpr int64_t kBytes = kTileSide / 16;
  static_assert(kBytes == 16, "what transpose_codes() makes of a column");
  for (int64_t c = 0; c < columns; c += static_cast<int64_t>(hn::MaxLanes(DB())))
    transpose_codes<3>(codes + c, columns, kBytes, out + kBytes * c);
  return out;
}

// Square blocks: repeats the value of each block for each of its columns.
template <class V>
HWY_INLINE const V* spread_groups(const V* values, int64_t count, int lines, V* out) {
  for (int64_t i = 0; i < count; ++i) std::fill_n(out + i * lines, lines, values[i]);
  return out;
}

// column_pass() from BF16 bits; returns false, having stored nothing, if that is not possible.
HWY_INLINE bool narrow_columns(const Direction& d, const TileView<uint16_t>& x,
                               const TileArea& area, Encoded e, Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const int lines = spec.block_lines();
  const int64_t blocks = x.rows / spec.block, groups = x.columns / lines;
  auto* amax = reinterpret_cast<uint16_t*>(scratch.amax);
  column_maxima(x, spec.block, amax);
  if (spec.square) {
    auto* most = reinterpret_cast<uint16_t*>(scratch.work);
    row_maxima(TileView<uint16_t>{amax, x.columns, blocks, x.columns}, spec.block, 1, most);
    amax = most;
  }
  if (!narrow_scales(spec, d.tensor_scale(area.batch), amax, groups * blocks, scratch.scale_codes,
                     scratch.scale_values))
    return false;
  const uint16_t* values = scratch.scale_values;
  if (spec.square)
    values = spread_groups(values, groups * blocks, lines,
                           reinterpret_cast<uint16_t*>(scratch.lane_inv));
  e.scale_bytes =
      scales_by_column(scratch.scale_codes, groups, reinterpret_cast<uint8_t*>(scratch.work));
  e.scale_pitch = kTileSide / 16;
  const LineStore store_lines(d, e, false);
  const auto encode = [&](const auto& encoder) HWY_ATTR {
    encode_narrow_columns(
        encoder, spec.block, x, values, e.pitch, scratch,
        [&](int64_t line) HWY_ATTR { store_lines(line, line + kPair, scratch.codes, scratch); });
  };
  with_mantissa_bits(spec.element, [&](auto m) HWY_ATTR {
    if constexpr (m == 1)
      encode(ThresholdLookup(d.tensor_thresholds(area.batch)));
    else
      encode(ByteEncoder<m>(spec.element));
  });
  return true;
}

template <class T>
HWY_INLINE void column_pass(const Direction& d, const TileView<T>& x, const TileArea& area,
                            Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const int lines = spec.block_lines();
  const int64_t blocks = x.rows / spec.block, groups = x.columns / lines;
  Encoded e{.batch = area.batch,
            .line = area.column,
            .lines = area.columns,
            .pos = area.row,
            .positions = x.rows,
            .pitch = x.rows / codes_per_byte(spec.element),
            .group_step = 1,
            .block_step = groups};
  if constexpr (std::is_same_v<T, uint16_t>)
    if (may_be_narrow(d, area.batch) && narrow_columns(d, x, area, e, scratch)) return;
  column_amaxes(x, spec.block, reinterpret_cast<BitsOf<T>*>(scratch.work), scratch.amax);
  if (spec.square) {
    const TileView<float> amaxes{reinterpret_cast<const float*>(scratch.amax), x.columns, blocks,
                                 x.columns};
    row_amaxes(amaxes, spec.block, 1, scratch.work, scratch.amax);
  }
  const bool has_bad = block_scales(spec, d.tensor_scale(area.batch), d.tensor_finite(area.batch),
                                    scratch.amax, groups * blocks, scratch.stored, scratch.inv);
  const float* inv = spec.square
                         ? spread_groups(scratch.inv, groups * blocks, lines, scratch.lane_inv)
                         : scratch.inv;
  if (!spec.square && spec.scale != Format::fp32) {
    for (int64_t i = 0; i < blocks * groups; i += static_cast<int64_t>(lanes()))
      hn::StoreU(hn::TruncateTo(DU8(), hn::LoadU(DU(), scratch.stored + i)), DU8(),
                 scratch.scale_codes + i);
    e.scale_bytes =
        scales_by_column(scratch.scale_codes, groups, reinterpret_cast<uint8_t*>(scratch.work));
    e.scale_pitch = kTileSide / 16;
  }
  const LineStore store_lines(d, e, has_bad);
  const auto done = [&](int64_t line)
                        HWY_ATTR { store_lines(line, line + kPair, scratch.codes, scratch); };
  with_mantissa_bits(spec.element, [&](auto m) HWY_ATTR {
    constexpr bool kMayBeWithin = std::is_same_v<T, uint16_t> && m != 1;
    if (spec.stochastic())
      encode_columns<m, true, false>(d, x, area, inv, e.pitch, scratch, done);
    else if (kMayBeWithin && is_within<T>(spec))
      encode_columns<m, false, kMayBeWithin>(d, x, area, inv, e.pitch, scratch, done);
    else
      encode_columns<m, false, false>(d, x, area, inv, e.pitch, scratch, done);
  });
}

// Whether the tiles of both directions have the same scales and, transposed, the same codes.
bool are_transposes(const Direction& a, const Direction& b) {
  const QuantSpec& spec = a.out.spec;
  return spec.square && !spec.stochastic() && spec.hadamard.dim == 0 && spec == b.out.spec &&
         std::equal(a.outer.begin(), a.outer.end(), b.outer.begin(),
                    [](auto s, auto t) { return s.enc == t.enc && s.dec == t.dec; });
}

// Stores the columns of a tile of rows x columns, from the codes and scales that its row pass left.
HWY_INLINE void transposed_pass(const Direction& d, const TileArea& area, int64_t rows,
                                int64_t columns, bool has_bad, Scratch& scratch) {
  const QuantSpec& spec = d.out.spec;
  const int per_byte = codes_per_byte(spec.element);
  const int64_t step = static_cast<int64_t>(hn::MaxLanes(DB()));
  const int64_t row_pitch = columns / per_byte;
  const Encoded e{.batch = area.batch,
                  .line = area.column,
                  .lines = area.columns,
                  .pos = area.row,
                  .positions = rows,
                  .pitch = rows / per_byte,
                  .group_step = 1,
                  .block_step = columns / spec.block};
  with_mantissa_bits(spec.element, [&](auto m) HWY_ATTR {
    for (int64_t at = 0; at < row_pitch; at += step) {
      const uint8_t* codes = kept_codes(scratch) + at;
      for (int64_t i = 0; i < e.pitch; i += 16)
        transpose_codes<m>(codes + i * per_byte * row_pitch, row_pitch, e.pitch, scratch.codes + i);
      store(d, e, at * per_byte, (at + step) * per_byte, has_bad, scratch.codes, scratch);
    }
  });
}

std::vector<ConstMatrix> inputs_of(const std::vector<Job>& jobs) {
  std::vector<ConstMatrix> parts;
  for (const Job& job : jobs) parts.push_back(job.x);
  return parts;
}

// All jobs have the same specs and directions.
void quantize_tiles(const std::vector<Job>& jobs, const Executor& executor) {
  const Direction *first_along = jobs[0].along, *first_down = jobs[0].down;
  const std::vector<ConstMatrix> parts = inputs_of(jobs);
  int64_t rows, columns;
  tile_extents(parts, first_down == nullptr, first_along ? first_along->out.spec.block_lines() : 1,
               rows, columns);
  // With two directions, each goes over the tile, unless one is the other's transpose.
  const bool both = first_along && first_down && !are_transposes(*first_along, *first_down);
  for_tiles(
      parts, rows, columns, both ? 2 : 1, executor,
      [&](size_t part, const TileArea& area, Scratch& scratch) HWY_ATTR {
        const Direction *along = jobs[part].along, *down = jobs[part].down;
        // Without a transform, the first pass begins with maxima, which copy the tile.
        const bool copies = down && (along ? along : down)->out.spec.hadamard.dim == 0;
        with_tile(parts[part], area, down == nullptr, copies, scratch, [&](auto tile) HWY_ATTR {
          if (along && down && are_transposes(*along, *down)) {
            const bool has_bad = row_pass(*along, tile, area, true, scratch);
            return transposed_pass(*down, area, tile.rows, tile.columns, has_bad, scratch);
          }
          if (along) {
            with_transform(along->out.spec.hadamard, true, tile, scratch,
                           [&](const auto& t)
                               HWY_ATTR { row_pass(*along, t, area, false, scratch); });
            tile.source = nullptr;  // copied by now
          }
          if (down)
            with_transform(down->out.spec.hadamard, false, tile, scratch,
                           [&](const auto& t) HWY_ATTR { column_pass(*down, t, area, scratch); });
        });
      });
}

// Bits of the largest magnitude of a tile.
template <class T>
HWY_INLINE uint32_t tile_amax(const TileView<T>& tile, Scratch& scratch) {
  // Each "block" is a vector of columns over all rows.
  constexpr int kColumns = 32;
  row_amaxes(tile, kColumns, static_cast<int>(tile.rows),
             reinterpret_cast<BitsOf<T>*>(scratch.work), scratch.amax);
  return *std::max_element(scratch.amax, scratch.amax + tile.columns / kColumns);
}

// Bits of the largest magnitude after the transform, for each matrix of a batch or each group.
void amax_tiles(const std::vector<ConstMatrix>& parts, const QuantSpec& spec, bool along_rows,
                std::atomic<uint32_t>* most, const Executor& executor) {
  int64_t rows, columns;
  tile_extents(parts, along_rows, 1, rows, columns);
  for_tiles(
      parts, rows, columns, 1, executor,
      [&](size_t part, const TileArea& area, Scratch& scratch) HWY_ATTR {
        uint32_t largest = 0;
        with_tile(parts[part], area, along_rows, false, scratch, [&](const auto& tile) HWY_ATTR {
          with_transform(spec.hadamard, along_rows, tile, scratch,
                         [&](const auto& t) HWY_ATTR { largest = tile_amax(t, scratch); });
        });
        std::atomic<uint32_t>& target = most[static_cast<int64_t>(part) + area.batch];
        for (uint32_t old = target; largest > old && !target.compare_exchange_weak(old, largest);) {
        }
      });
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace blockscale::cpu {
HWY_EXPORT(quantize_tiles);
HWY_EXPORT(amax_tiles);
namespace {

ConstMatrix transposed(ConstMatrix x) {
  std::swap(x.rows, x.columns);
  std::swap(x.row_stride, x.column_stride);
  return x;
}
// A column-major matrix is read as its row-major transpose, with the directions swapped.
bool is_column_major(const ConstMatrix& x) { return x.column_stride != 1 && x.row_stride == 1; }

}  // namespace

void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, const Groups& groups, float* out,
          const Executor& executor) {
  const auto matrices = static_cast<size_t>(groups ? groups.count : x.batch);
  std::vector<std::atomic<uint32_t>> most(matrices);
  const bool swapped = is_column_major(x);
  std::vector<ConstMatrix> parts = parts_of(x, groups);
  if (swapped) std::transform(parts.begin(), parts.end(), parts.begin(), transposed);
  HWY_DYNAMIC_DISPATCH(amax_tiles)(parts, spec, (axis == -1) != swapped, most.data(), executor);
  for (size_t i = 0; i < matrices; ++i)
    out[i] = bit_cast<float>(most[i] > kInfBits ? kNanBits : most[i].load());
}

void quantize(const ConstMatrix& x, const Quantized* row_out, const QuantizeOptions& row_options,
              const Quantized* column_out, const QuantizeOptions& column_options,
              const Executor& executor) {
  QuantizeOptions row_with = row_options, column_with = column_options;
  // Without a transform, one amax serves both directions.
  std::vector<float> amaxes;
  const auto lacks_plain_amax = [](const Quantized* q, const QuantizeOptions& o) {
    return q && q->spec.outer && !o.amax && q->spec.hadamard.dim == 0;
  };
  if (lacks_plain_amax(row_out, row_options) && lacks_plain_amax(column_out, column_options)) {
    amaxes.resize(static_cast<size_t>(row_out->matrices()));
    amax(x, row_out->spec, -1, row_out->groups, amaxes.data(), executor);
    row_with.amax = column_with.amax = amaxes.data();
  }
  std::vector<Direction> row, column;
  if (row_out) row = directions(x, *row_out, row_with, executor);
  if (column_out) column = directions(x, *column_out, column_with, executor);
  const bool swapped = is_column_major(x);
  std::vector<Job> jobs;
  for (const ConstMatrix& part : parts_of(x, (row_out ? row_out : column_out)->groups)) {
    const Direction* along = row_out ? &row[jobs.size()] : nullptr;
    const Direction* down = column_out ? &column[jobs.size()] : nullptr;
    if (swapped)
      jobs.push_back({transposed(part), down, along});
    else
      jobs.push_back({part, along, down});
  }
  HWY_DYNAMIC_DISPATCH(quantize_tiles)(jobs, executor);
}

}  // namespace blockscale::cpu
#endif
