// Inputs in any strides with poison between the elements, and outputs with guard bytes around them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "blockscale/ops.h"
#include "testing.h"

namespace blockscale::testing {

// ---- inputs ----

enum class Strides {
  row_major,
  column_major,
  padded_rows,
  padded_columns,
  negative_rows,
  negative_columns,
  every_second_column,
  every_second_row,
  same_row,  // stride 0: one row, seen in every row
  same_column,
  same_matrix,   // stride 0 over the batch
  aligned_rows,  // every row at a multiple of 16 bytes, with some room between
  aligned_columns,
  even_rows,  // at a multiple of 4 bytes, for 16-bit types
};
inline constexpr Strides kStrides[] = {
    Strides::row_major,           Strides::column_major,     Strides::padded_rows,
    Strides::padded_columns,      Strides::negative_rows,    Strides::negative_columns,
    Strides::every_second_column, Strides::every_second_row, Strides::same_row,
    Strides::same_column,         Strides::same_matrix,      Strides::aligned_rows,
    Strides::aligned_columns,     Strides::even_rows};
// Those with contiguous columns.
inline constexpr Strides kRowStrides[] = {
    Strides::row_major,   Strides::padded_rows,      Strides::aligned_rows, Strides::even_rows,
    Strides::same_matrix, Strides::every_second_row, Strides::same_row,     Strides::negative_rows};

using Values = std::function<float(int64_t batch, int64_t row, int64_t column)>;

// A matrix of `values`. What lies between and around the elements is NaN: reading it shows.
class Input {
 public:
  Input(DType dtype, int64_t batch, int64_t rows, int64_t columns, Strides kind,
        const Values& values) {
    ConstMatrix& x = view_;
    x.dtype = dtype, x.batch = batch, x.rows = rows, x.columns = columns;
    x.row_stride = columns, x.column_stride = 1;
    int64_t first = 0, size = rows * columns, lead = 5, gap = 7;
    switch (kind) {
      case Strides::row_major:
      case Strides::same_matrix:
        break;
      case Strides::column_major:
        x.row_stride = 1, x.column_stride = rows;
        break;
      case Strides::padded_rows:
        x.row_stride = columns + 3, size = rows * (columns + 3);
        break;
      case Strides::padded_columns:
        x.row_stride = 1, x.column_stride = rows + 5, size = columns * (rows + 5);
        break;
      case Strides::negative_rows:
        x.row_stride = -columns, first = rows ? (rows - 1) * columns : 0;
        break;
      case Strides::negative_columns:
        x.column_stride = -1, first = columns ? columns - 1 : 0;
        break;
      case Strides::every_second_column:
        x.row_stride = 2 * columns, x.column_stride = 2, size = 2 * rows * columns;
        break;
      case Strides::every_second_row:
        x.row_stride = 2 * columns, size = 2 * rows * columns;
        break;
      case Strides::same_row:
        x.row_stride = 0, size = columns;
        break;
      case Strides::same_column:
        x.row_stride = 1, x.column_stride = 0, size = rows;
        break;
      case Strides::aligned_rows:
        x.row_stride = round_up(columns, 8) + 8, size = rows * x.row_stride;
        lead = gap = 8;
        break;
      case Strides::aligned_columns:
        x.row_stride = 1, x.column_stride = round_up(rows, 8) + 8;
        size = columns * x.column_stride, lead = gap = 8;
        break;
      case Strides::even_rows:
        x.row_stride = round_up(columns, 2) + 2, size = rows * x.row_stride;
        lead = gap = 6;
        break;
    }
    x.batch_stride = kind == Strides::same_matrix ? 0 : size + gap;
    const int64_t total = lead + (size + gap) * std::max<int64_t>(batch, 1) + 32;
    storage_.resize(static_cast<size_t>(total * dtype_bytes(dtype)));
    for (int64_t i = 0; i < total; ++i) put(i, std::nanf(""));
    first += lead;
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < columns; ++c)
          put(first + b * x.batch_stride + r * x.row_stride + c * x.column_stride, values(b, r, c));
    x.data = storage_.data() + first * dtype_bytes(dtype);
    before_ = storage_;
  }
  const ConstMatrix& view() const { return view_; }
  // What is stored: the value after rounding to the dtype, and after any aliasing of strides.
  float at(int64_t b, int64_t r, int64_t c) const {
    const int64_t i = b * view_.batch_stride + r * view_.row_stride + c * view_.column_stride;
    return load_element(view_, i);
  }
  bool untouched() const { return storage_ == before_; }
  const std::vector<uint8_t>& storage() const { return storage_; }

 private:
  void put(int64_t i, float value) {
    uint8_t* at = storage_.data() + i * dtype_bytes(view_.dtype);
    const uint16_t half = view_.dtype == DType::bf16 ? to_bf16(value) : to_fp16(value);
    if (dtype_bytes(view_.dtype) == 4)
      std::memcpy(at, &value, 4);
    else
      std::memcpy(at, &half, 2);
  }
  ConstMatrix view_;
  std::vector<uint8_t> storage_, before_;
};

// ---- outputs ----

// Bytes with 64 guard bytes on either side, poisoned.
class Guarded {
 public:
  explicit Guarded(int64_t size, uint8_t poison = 0xCD)
      : bytes_(static_cast<size_t>(size + 2 * kGuard), kGuardByte) {
    std::fill_n(data(), size, poison);
  }
  uint8_t* data() { return bytes_.data() + kGuard; }
  const uint8_t* data() const { return bytes_.data() + kGuard; }
  int64_t size() const { return static_cast<int64_t>(bytes_.size()) - 2 * kGuard; }
  // With the guards.
  uint8_t* all() { return bytes_.data(); }
  const uint8_t* all() const { return bytes_.data(); }
  int64_t all_size() const { return static_cast<int64_t>(bytes_.size()); }
  bool guards_whole() const {
    for (int64_t i = 0; i < kGuard; ++i)
      if (bytes_[i] != kGuardByte || bytes_[bytes_.size() - 1 - i] != kGuardByte) return false;
    return true;
  }
  bool operator==(const Guarded& other) const { return bytes_ == other.bytes_; }
  // Where two buffers differ first, for messages.
  std::string difference(const Guarded& other) const {
    if (size() != other.size()) return "sizes differ";
    int64_t count = 0, first = -1;
    for (int64_t i = 0; i < size(); ++i)
      if (data()[i] != other.data()[i] && ++count == 1) first = i;
    if (count == 0) return guards_whole() && other.guards_whole() ? "" : "guard bytes written";
    return std::to_string(count) + " of " + std::to_string(size()) + " bytes, first at " +
           std::to_string(first) + ": " + std::to_string(data()[first]) + " and " +
           std::to_string(other.data()[first]);
  }

  static constexpr int64_t kGuard = 64;

 private:
  static constexpr uint8_t kGuardByte = 0xA5;
  std::vector<uint8_t> bytes_;
};

// Ends of groups in the integers that the operators take.
class Offsets {
 public:
  Offsets(const std::vector<int64_t>& ends, bool wide)
      : bytes_(ends.size() * (wide ? 8 : 4)),
        count_(static_cast<int64_t>(ends.size())),
        wide_(wide) {
    for (size_t g = 0; g < ends.size(); ++g) {
      const int64_t end = ends[g];
      const auto narrow = static_cast<int32_t>(end);
      std::memcpy(bytes_.data() + g * (wide ? 8 : 4),
                  wide ? static_cast<const void*>(&end) : &narrow, wide ? 8 : 4);
    }
  }
  Groups view() const { return {bytes_.data(), wide_, count_}; }

 private:
  std::vector<uint8_t> bytes_;
  int64_t count_;
  bool wide_;
};

// A quantized operand in guarded buffers.
struct Output {
  Output(const QuantSpec& spec, const StorageLayout& layout, int axis, int64_t rows,
         int64_t columns, int64_t batch = 1, const Groups& groups = {})
      : shape(groups ? grouped_shape(spec, layout, axis, rows, columns, groups.count)
                     : stored_shape(spec, layout, axis, rows, columns)),
        codes(batch * shape.code_bytes),
        scales(batch * shape.scale_count * scale_bytes(spec.scale)),
        outer(spec.outer ? (groups ? groups.count : batch) * 4 : 0) {
    view.spec = spec, view.layout = layout, view.axis = axis;
    view.rows = rows, view.columns = columns, view.batch = batch, view.groups = groups;
    view.codes = codes.data(), view.scales = scales.data();
    view.outer = spec.outer ? reinterpret_cast<float*>(outer.data()) : nullptr;
  }
  Output(const Output&) = delete;

  // Code of (line, position) and scale of (line, block) of one matrix, in any layout.
  int code(int64_t b, int64_t line, int64_t position) const {
    const int per_byte = codes_per_byte(view.spec.element);
    const int64_t at =
        b * shape.code_bytes +
        layout_offset(view.layout.codes, shape.lines, shape.line_bytes, line, position / per_byte);
    const int byte = codes.data()[at];
    return per_byte == 1 ? byte : position % 2 ? byte >> 4 : byte & 15;
  }
  uint32_t scale(int64_t b, int64_t line, int64_t block) const {
    const bool grid =
        view.spec.square && kLayouts[static_cast<int>(view.layout.scales)].scale_bytes != 1;
    const int64_t at =
        b * shape.scale_count + layout_offset(view.layout.scales, shape.scale_rows, shape.blocks,
                                              grid ? line / view.spec.block : line, block);
    if (view.spec.scale != Format::fp32) return scales.data()[at];
    uint32_t bits;
    std::memcpy(&bits, scales.data() + 4 * at, 4);
    return bits;
  }
  float outer_scale(int64_t b) const { return view.spec.outer ? view.outer[b] : 1.0f; }

  StoredShape shape;
  Guarded codes, scales, outer;
  Quantized view;
};

inline ::testing::AssertionResult same_operand(const Output& a, const Output& b) {
  for (const auto& [name, x, y] :
       {std::tuple("codes", &a.codes, &b.codes), std::tuple("scales", &a.scales, &b.scales),
        std::tuple("outer", &a.outer, &b.outer)}) {
    const std::string difference = x->difference(*y);
    if (!difference.empty())
      return ::testing::AssertionFailure() << name << " differ in " << difference;
  }
  return ::testing::AssertionSuccess();
}

// ---- executors ----

// Cuts the range at odd places, and runs the pieces out of order on several threads.
class OddExecutor final : public Executor {
 public:
  explicit OddExecutor(uint64_t seed) : seed_(seed) {}
  void parallel_for(int64_t count, const Body& body) const override {
    Random random(seed_);
    std::vector<std::pair<int64_t, int64_t>> pieces;
    for (int64_t at = 0; at < count;) {
      const int64_t end = std::min(count, at + 1 + static_cast<int64_t>(random.below(5)));
      pieces.emplace_back(at, end);
      if (random.one_in(8)) pieces.emplace_back(end, end);
      at = end;
    }
    for (size_t i = pieces.size(); i > 1; --i) std::swap(pieces[i - 1], pieces[random.below(i)]);
    constexpr size_t kThreads = 5;
    std::vector<std::thread> pool;
    for (size_t t = 0; t < std::min(kThreads, pieces.size()); ++t)
      pool.emplace_back([&, t] {
        for (size_t i = t; i < pieces.size(); i += kThreads)
          body(pieces[i].first, pieces[i].second);
      });
    for (std::thread& thread : pool) thread.join();
  }

 private:
  uint64_t seed_;
};

}  // namespace blockscale::testing
