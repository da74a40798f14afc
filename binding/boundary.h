// Between torch tensors and the core's views: names, checks and allocation. Everything that torch
// knows and the core does not (dtypes, devices, stored shapes) is checked here, once.
#pragma once

#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"

namespace blockscale::binding {

// A `str` argument. TORCH_BOX can pass std::string too, but its conversion leaks the string.
struct Text {
  std::string value;
};

// kParse(text), done once per thread: an operator that is called thousands of times a step gets the
// same few texts.
template <auto kParse>
const auto& parsed_once(const Text& text) {
  thread_local std::unordered_map<std::string, decltype(kParse(text.value))> cache;
  const auto found = cache.find(text.value);
  if (found != cache.end()) return found->second;
  return cache.emplace(text.value, kParse(text.value)).first->second;
}
const QuantSpec& spec_of(const Text& text);
const StorageLayout& layout_of(const Text& text);

// A high-precision operand; `tensor` keeps the memory that `view` points into.
struct Input {
  Tensor tensor;
  ConstMatrix view;
};
// batch_dims 0: all leading dimensions are rows; 1: [E, R, C] is a batch of E matrices. Any
// strides; only leading dimensions that no single row stride describes are copied.
Input input(const Context& at, const Tensor& x, int axis, int64_t batch_dims);
// Rows of x [..., K] as one matrix.
int64_t rows_of(const Tensor& x);

// The groups that `offsets` cuts the rows of x into, or none. The tensor keeps their memory.
Groups groups_of(const Context& at, const std::optional<Tensor>& offsets,
                 std::optional<int64_t> batch, int64_t rows);

// The logical extents of an operand: of a matrix, of a batch of them or, with groups, of one whose
// rows they cut.
struct Extent {
  int64_t rows, columns;
  std::optional<int64_t> batch{};  // none: a single matrix, without a dimension for it
  Groups groups{};
};
// From a list: [R, C], or [E, R, C] for a batch.
Extent extent_of(const char* op, const Ints& shape);

// A quantized operand in fresh tensors.
struct Output {
  Tensor codes, scales, outer;
  Quantized view;
};
// `bytes`: codes and scales are tensors of bytes, whose last extent counts them, as FSDP2 moves
// them.
Output allocate(const Context& at, const QuantSpec& spec, const StorageLayout& layout, int axis,
                const Extent& extent, bool bytes = false);

// A quantized operand that came from a caller: its tensors must be what `allocate` would make.
struct Operand {
  Tensor codes, scales, outer;
  ConstQuantized view;
};
// `prefix` names the operand in errors, e.g. "a_".
Operand operand(const Context& at, const std::string& prefix, const Tensor& codes,
                const Tensor& scales, const Tensor& outer, const QuantSpec& spec,
                const StorageLayout& layout, int axis, const Extent& extent, bool bytes = false);

// torch's name, e.g. "float8_e4m3fn"; torch/headeronly only has "Float8_e4m3fn".
std::string dtype_text(ScalarType type);
std::string shape_text(const Tensor& t);
int checked_axis(const char* op, int64_t axis);
DType dtype_of(const char* op, const char* argument, ScalarType type);

// The memory of a contiguous tensor as matrices to write.
Matrix matrices(const Context& at, const Tensor& out, int64_t rows, int64_t columns,
                int64_t batch = 1);

// One int64 on the device of the call.
const int64_t* key_of(const Context& at, const char* name, const Tensor& t);
// The key of random bits, `step` added to the seed. On a GPU it stays there: reading it here would
// wait for the device.
void set_key(const Context& at, QuantizeOptions& options, const int64_t* seed,
             const int64_t* offset, uint64_t step = 0);

// What `amax`, `seed`, `offset` and `origin` ask for. `amax_tensor` keeps the memory of `options`;
// on a GPU amax stays there too. `amax_name`: of that argument. `matrices`: how many have an outer
// scale of their own.
struct Options {
  std::optional<Tensor> amax_tensor;
  QuantizeOptions options;
};
Options options(const Context& at, const QuantSpec& spec, const char* amax_name,
                const std::optional<Tensor>& amax, const std::optional<Tensor>& seed,
                const std::optional<Tensor>& offset, const Ints& origin, int64_t matrices);

}  // namespace blockscale::binding

HIDDEN_NAMESPACE_BEGIN(torch, stable, detail)
template <>
struct ToImpl<blockscale::binding::Text> {
  static blockscale::binding::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    size_t length = 0;
    const char* data = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    blockscale::binding::Text text{std::string(data, length)};
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
HIDDEN_NAMESPACE_END(torch, stable, detail)
