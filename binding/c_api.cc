// What the core knows of itself, as JSON through plain C, for Python's ctypes. The Python layer
// holds no format facts of its own.
//
// Every function writes NUL-terminated UTF-8 to `out` (capacity `n`) and returns its length; a
// length >= n means that the text was cut: call again with more room. On failure the length is
// negated and the text is the error.
#include <algorithm>
#include <charconv>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "blockscale/ops.h"
#include "matmul.h"
#include "operands.h"

namespace blockscale {
namespace {

std::string quote(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return out + '"';
}

const char* boolean(bool value) { return value ? "true" : "false"; }

// [item(x), ...]
template <class Range, class Item>
std::string list(const Range& range, Item item) {
  std::string out = "[";
  for (const auto& x : range) {
    if (out.size() > 1) out += ", ";
    out += item(x);
  }
  return out + "]";
}

// Numbers as JSON has them, whatever the locale of the program.
std::ostringstream json_text() {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  return out;
}

std::string spec_json(const QuantSpec& s) {
  std::ostringstream out = json_text();
  out << "{\"text\": " << quote(to_string(s)) << ", \"family\": " << quote(family_of(s).name)
      << ", \"element\": " << quote(traits(s.element).name)
      << ", \"codes_per_byte\": " << codes_per_byte(s.element)
      << ", \"scale\": " << quote(traits(s.scale).name)
      << ", \"scale_bytes\": " << scale_bytes(s.scale) << ", \"block\": [" << s.block_lines()
      << ", " << s.block << "], \"rule\": " << quote(to_string(s.rule))
      << ", \"scale_rounding\": " << quote(to_string(s.scale_rounding))
      << ", \"rounding\": " << quote(to_string(s.rounding)) << ", \"outer\": " << boolean(s.outer)
      << ", \"hadamard\": " << s.hadamard.dim
      << ", \"hadamard_mask\": " << quote(mask_text(s.hadamard))
      << ", \"extent_multiple\": " << (s.hadamard.dim ? s.hadamard.dim : 1)
      << ", \"gemm_layout\": " << quote(to_string(binding::gemm_layout(s))) << "}";
  return out.str();
}

std::string layout_json(const LayoutTraits& t) {
  const char* applies = t.for_codes && t.for_scales ? "both" : t.for_codes ? "codes" : "scales";
  std::ostringstream out = json_text();
  out << "{\"name\": " << quote(t.name) << ", \"applies\": " << quote(applies)
      << ", \"scale_bytes\": " << t.scale_bytes << ", \"row_multiple\": " << t.row_multiple
      << ", \"column_multiple\": " << t.column_multiple << "}";
  return out.str();
}

std::string element_json(const FormatTraits& t, Format f) {
  std::ostringstream out = json_text();
  out << "{\"name\": " << quote(t.name) << ", \"bits\": " << t.bits()
      << ", \"max\": " << max_value(f) << "}";
  return out.str();
}

std::string describe_json() {
  std::vector<Format> elements, scales;
  for (int i = 0; i < kFormatCount; ++i)
    (kFormats[i].is_element ? elements : scales).push_back(static_cast<Format>(i));
  std::ostringstream out = json_text();
  out << "{\"version\": " << quote(BLOCKSCALE_VERSION)
      << ", \"instruction_set\": " << quote(instruction_set())
      << ", \"instruction_sets\": " << list(instruction_sets(), quote)
      << ", \"specs\": " << list(families(), [](const Family& f) { return quote(f.name); })
      << ", \"elements\": " << list(elements, [](Format f) { return element_json(traits(f), f); })
      << ", \"scales\": " << list(scales, [](Format f) { return quote(traits(f).name); })
      << ", \"layouts\": " << list(kLayouts, layout_json) << ", \"group_line\": " << kGroupLine
      << ", \"hadamard_sizes\": " << list(kHadamardSizes, [](int d) { return std::to_string(d); })
      << "}";
  return out.str();
}

// Apart from the rest: to ask a GPU what it is wakes its driver, and a process that has done so
// cannot use the GPU in its forked children. Importing a package must not do that.
std::string backends_json() {
  return list(backends(), [](const Backend& b) {
    return "{\"name\": " + quote(b.name) + ", \"available\": " + boolean(b.available) +
           ", \"reason\": " + quote(b.reason) + "}";
  });
}

long write(std::string_view text, bool ok, char* out, long n) {
  if (n > 0) {
    const size_t count = std::min(text.size(), static_cast<size_t>(n - 1));
    std::memcpy(out, text.data(), count);
    out[count] = '\0';
  }
  const long length = static_cast<long>(text.size());
  return ok ? length : -length;
}

// No exception crosses the C boundary.
template <class Make>
long answer(const Make& make, char* out, long n) noexcept {
  try {
    return write(make(), true, out, n);
  } catch (const std::exception& error) {
    return write(error.what(), false, out, n);
  } catch (...) {
    return write("unknown error", false, out, n);
  }
}

int64_t count_of(const char* op, const char* name, std::string_view text) {
  int64_t count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  if (error != std::errc() || end != text.data() + text.size() || count < 0)
    fail(op, name, text, "a number from 0 on");
  return count;
}

}  // namespace
}  // namespace blockscale

#define BLOCKSCALE_EXPORT extern "C" __attribute__((visibility("default")))

BLOCKSCALE_EXPORT long bs_describe(char* out, long n) {
  return blockscale::answer(blockscale::describe_json, out, n);
}

BLOCKSCALE_EXPORT long bs_backends(char* out, long n) {
  return blockscale::answer(blockscale::backends_json, out, n);
}

BLOCKSCALE_EXPORT long bs_spec(const char* text, char* out, long n) {
  using namespace blockscale;
  return answer([&] { return spec_json(parse_spec(text)); }, out, n);
}

BLOCKSCALE_EXPORT long bs_spec_with(const char* text, const char* changes, char* out, long n) {
  using namespace blockscale;
  return answer([&] { return spec_json(with_changes(parse_spec(text), changes)); }, out, n);
}

BLOCKSCALE_EXPORT long bs_explain(const char* spec, const char* layout, const char* device,
                                  char* out, long n) {
  using namespace blockscale;
  return answer([&] { return explain(spec, layout, device); }, out, n);
}

// What a GEMM of such operands still needs there; empty when it can run.
BLOCKSCALE_EXPORT long bs_matmul_needs(const char* spec, const char* device, char* out, long n) {
  using namespace blockscale;
  return answer([&] { return binding::matmul_needs(parse_spec(spec), device); }, out, n);
}

// The path of matmul or grouped_matmul there, or its refusal.
BLOCKSCALE_EXPORT long bs_matmul_path(const char* op, const char* spec, const char* device,
                                      char* out, long n) {
  using namespace blockscale;
  return answer([&] { return binding::matmul_path(op, parse_spec(spec), device); }, out, n);
}

// Whether the operands of a layer's products are widened on the current GPU, where the left ones
// have spec `a` and rows in so many groups (or 0), and the right ones have spec `weight`.
BLOCKSCALE_EXPORT long bs_widens(const char* a, const char* weight, const char* groups, char* out,
                                 long n) {
  using namespace blockscale;
  const auto widens = [&] {
    const int64_t count = count_of("widens", "groups", groups);
    return boolean(gpu::widens(parse_spec(a), parse_spec(weight), count));
  };
  return answer(widens, out, n);
}
