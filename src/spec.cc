#include "blockscale/spec.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <optional>

#include "blockscale/status.h"
#include "text.h"

namespace blockscale {
namespace {

constexpr const char* kRuleNames[] = {"amax", "pow2",  "floor",    "ceil",
                                      "even", "rceil", "two_level"};
constexpr const char* kScaleRoundingNames[] = {"nearest", "up"};
constexpr const char* kRoundingNames[] = {"nearest", "stochastic"};

bool saturates(ScaleRule rule) { return rule == ScaleRule::floor || rule == ScaleRule::even; }

template <class T>
bool contains(const std::vector<T>& list, T value) {
  return std::find(list.begin(), list.end(), value) != list.end();
}

std::string format_names(const std::vector<Format>& list) {
  std::vector<std::string> names;
  for (Format f : list) names.push_back(traits(f).name);
  return join(names, ", ");
}
std::string rule_names(const std::vector<ScaleRule>& list) {
  std::vector<std::string> names;
  for (ScaleRule r : list) names.push_back(to_string(r));
  return join(names, ", ");
}

std::string block_text(const QuantSpec& s) {
  const std::string b = std::to_string(s.block);
  return (s.square ? b : "1") + "x" + b;
}

// A mask has no bits beyond the transform's size; with dim 0 it has none at all.
bool mask_fits(const Hadamard& h) {
  return h.dim == 128 || (h.mask_hi == 0 && (h.dim == 64 || h.mask_lo >> h.dim == 0));
}

template <size_t kCount>
int index_of(const char* const (&names)[kCount], std::string_view name, const char* argument) {
  for (size_t i = 0; i < kCount; ++i)
    if (name == names[i]) return static_cast<int>(i);
  const std::vector<std::string> all(std::begin(names), std::end(names));
  fail("spec", argument, quoted(name), "one of " + join(all, ", "), did_you_mean(name, all));
}

Format parse_format(std::string_view given, bool element) {
  std::vector<std::string> all;
  std::string_view name = given;
  for (const std::string_view prefix : {"torch.", "float8_"})  // PyTorch's dtype names
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  for (int i = 0; i < kFormatCount; ++i) {
    if (kFormats[i].is_element != element) continue;
    if (name == kFormats[i].name) return static_cast<Format>(i);
    all.push_back(kFormats[i].name);
  }
  fail("spec", element ? "element" : "scale", quoted(given), "one of " + join(all, ", "),
       did_you_mean(name, all));
}

std::optional<uint64_t> parse_number(std::string_view text) {
  int base = 10;
  if (text.starts_with("0x") || text.starts_with("0X")) {
    text.remove_prefix(2);
    base = 16;
  }
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

bool parse_bool(std::string_view value, const char* argument) {
  if (value == "true" || value == "True") return true;
  if (value == "false" || value == "False") return false;
  fail("spec", argument, quoted(value), "true or false");
}

void set_block(QuantSpec& spec, std::string_view value) {
  const size_t x = value.find('x');
  const auto lines = x == std::string_view::npos ? std::nullopt : parse_number(value.substr(0, x));
  const auto block = x == std::string_view::npos ? std::nullopt : parse_number(value.substr(x + 1));
  const uint64_t b = spec.block;
  if (!lines || !block || *block != b || (*lines != 1 && *lines != b))
    fail("spec", "block", value,
         "1x" + std::to_string(b) + " or " + std::to_string(b) + "x" + std::to_string(b),
         "the scale format " + std::string(traits(spec.scale).name) + " fixes the block size");
  spec.square = *lines != 1;
}

std::string hadamard_sizes() {
  std::vector<std::string> sizes;
  for (const int size : kHadamardSizes) sizes.push_back(std::to_string(size));
  return join(sizes, ", ");
}

// "none" or "0", "32" (the default signs of that size) or "16:0xd7e8".
Hadamard parse_hadamard(std::string_view value) {
  if (value == "none" || value == "0") return {};
  const size_t colon = value.find(':');
  Hadamard h;
  const auto dim = parse_number(value.substr(0, colon));
  const auto is_dim = [&](int size) { return dim && *dim == static_cast<uint64_t>(size); };
  if (std::none_of(std::begin(kHadamardSizes), std::end(kHadamardSizes), is_dim))
    fail("spec", "hadamard", value, "none, or one of the sizes " + hadamard_sizes(),
         "write hadamard=16, or 16:0xd7e8 to give the sign mask");
  h.dim = static_cast<uint16_t>(*dim);
  if (colon == std::string_view::npos) {
    h.mask_lo = h.dim == 16 ? kDefaultSigns16 : 0;
    return h;
  }
  std::string_view mask = value.substr(colon + 1);
  std::optional<uint64_t> low, high = 0;
  if ((mask.starts_with("0x") || mask.starts_with("0X")) && mask.size() > 18) {
    high = parse_number("0x" + std::string(mask.substr(2, mask.size() - 18)));
    low = parse_number("0x" + std::string(mask.substr(mask.size() - 16)));
  } else {
    low = parse_number(mask);
  }
  h.mask_lo = low.value_or(0);
  h.mask_hi = high.value_or(0);
  if (!low || !high || !mask_fits(h))
    fail("spec", "hadamard", value, "a sign mask of at most " + std::to_string(h.dim) + " bits",
         "bit i set flips the sign of element i");
  return h;
}

void check_family_has(const Family& family, const QuantSpec& spec) {
  if (!contains(family.elements, spec.element)) {
    std::string remedy;
    for (const Family& other : families())
      if (other.spec.scale == spec.scale && contains(other.elements, spec.element))
        remedy = "use " + quoted(other.name);
    fail("spec", "element", traits(spec.element).name,
         "one of " + format_names(family.elements) + " for " + family.name, remedy);
  }
  if (!contains(family.rules, spec.rule))
    fail("spec", "scale_rule", to_string(spec.rule),
         "one of " + rule_names(family.rules) + " for " + family.name,
         std::string("its scales are ") + traits(family.spec.scale).name);
}

// The scale format may be stated, but must be the one that the family's name implies.
void check_scale(const Family& family, const QuantSpec& spec, std::string_view value) {
  if (parse_format(value, false) == spec.scale) return;
  std::string remedy = "the scale format is what the name means";
  for (const Family& other : families())
    if (value == traits(other.spec.scale).name && contains(other.elements, spec.element))
      remedy = "use " + quoted(other.name);
  fail("spec", "scale", quoted(value), std::string(traits(spec.scale).name) + " for " + family.name,
       remedy);
}

}  // namespace

const char* to_string(ScaleRule rule) { return kRuleNames[static_cast<int>(rule)]; }
const char* to_string(ScaleRounding r) { return kScaleRoundingNames[static_cast<int>(r)]; }
const char* to_string(Rounding r) { return kRoundingNames[static_cast<int>(r)]; }

std::string mask_text(const Hadamard& h) {
  char text[64];
  if (h.mask_hi)
    std::snprintf(text, sizeof text, "0x%llx%016llx", static_cast<unsigned long long>(h.mask_hi),
                  static_cast<unsigned long long>(h.mask_lo));
  else
    std::snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(h.mask_lo));
  return text;
}

const std::vector<Family>& families() {
  static const std::vector<Format> kFp8 = {Format::e4m3fn, Format::e4m3fnuz, Format::e5m2,
                                           Format::e5m2fnuz};
  static const std::vector<ScaleRule> kFloatRules = {ScaleRule::amax, ScaleRule::pow2};
  static const std::vector<ScaleRule> kMxRules = {ScaleRule::floor, ScaleRule::ceil,
                                                  ScaleRule::even, ScaleRule::rceil};
  static const std::vector<Family> table = {
      {"fp8_1x128", kFp8_1x128, kFp8, kFloatRules},
      {"fp8_128x128", kFp8_128x128, kFp8, kFloatRules},
      {"mxfp8", kMxfp8, kFp8, kMxRules},
      {"mxfp6", kMxfp6, {Format::e2m3, Format::e3m2}, kMxRules},
      {"mxfp4", kMxfp4, {Format::e2m1}, kMxRules},
      {"nvfp4", kNvfp4, {Format::e2m1}, {ScaleRule::two_level}},
      {"amdfp4", kAmdfp4, {Format::e2m1}, {ScaleRule::two_level}},
  };
  return table;
}

// An enumerator out of range would index past the end of its table.
template <class Enum>
void check_enumerator(const char* argument, Enum value, size_t count) {
  if (static_cast<size_t>(value) >= count)
    fail("spec", argument, static_cast<int>(value), "one of " + std::to_string(count),
         "start from a named spec");
}

const Family& family_of(const QuantSpec& spec) {
  check_enumerator("element", spec.element, kFormatCount);
  check_enumerator("scale", spec.scale, kFormatCount);
  check_enumerator("scale_rule", spec.rule, std::size(kRuleNames));
  check_enumerator("scale_rounding", spec.scale_rounding, std::size(kScaleRoundingNames));
  check_enumerator("rounding", spec.rounding, std::size(kRoundingNames));
  for (const Family& f : families()) {
    if (f.spec.scale != spec.scale || !contains(f.elements, spec.element)) continue;
    // FP8's two block shapes have separate names; elsewhere the shape is a change within a family.
    if (spec.scale == Format::fp32 && f.spec.square != spec.square) continue;
    return f;
  }
  fail("spec", "element", traits(spec.element).name,
       std::string("an element that takes ") + traits(spec.scale).name + " scales",
       "start from a named spec");
}

static std::string two_level_names() {
  std::vector<std::string> names;
  for (const Family& f : families())
    if (f.spec.two_level()) names.push_back(f.name);
  return join(names, ", ");
}

void validate(const QuantSpec& spec) {
  const Family& family = family_of(spec);
  check_family_has(family, spec);
  if (spec.block != family.spec.block)
    fail("spec", "block", block_text(spec), "blocks of " + std::to_string(family.spec.block),
         "the scale format fixes the block size");
  if (spec.outer && !spec.two_level())
    fail("spec", "outer", "true",
         "false: only two-level specs (" + two_level_names() + ") have an outer scale");
  if (spec.scale_rounding == ScaleRounding::up && !spec.two_level())
    fail("spec", "scale_rounding", "up",
         "nearest: only two-level specs (" + two_level_names() + ") round their scales",
         "choose the scale_rule instead");
  if (spec.stochastic() && saturates(spec.rule))
    fail("spec", "scale_rule", to_string(spec.rule),
         "ceil or rceil with rounding = stochastic: this rule lets the largest elements saturate, "
         "which biases the mean",
         "add scale_rule=rceil");
  const Hadamard& h = spec.hadamard;
  if (h.dim != 0 && std::find(std::begin(kHadamardSizes), std::end(kHadamardSizes), h.dim) ==
                        std::end(kHadamardSizes))
    fail("spec", "hadamard", h.dim, "0 (none), or one of the sizes " + hadamard_sizes());
  if (!mask_fits(h))
    fail("spec", "hadamard", mask_text(h), "a sign mask of at most as many bits as the size");
}

void validate_pair(const char* operation, const QuantSpec& a, const QuantSpec& b) {
  if (a.hadamard != b.hadamard)
    fail(operation, "b", to_string(b), "the Hadamard transform of a, " + to_string(a),
         "transform both operands of a GEMM or neither");
  if (a.block != b.block)
    fail(operation, "b", to_string(b),
         "blocks of " + std::to_string(a.block) + " along the contraction axis, as in a",
         "use one block size for both operands of a GEMM");
}

std::string to_string(const QuantSpec& spec) {
  const Family& family = family_of(spec);
  const QuantSpec& base = family.spec;
  std::vector<std::string> changes;
  auto note = [&](bool differs, const char* key, const std::string& value) {
    if (differs) changes.push_back(std::string(key) + "=" + value);
  };
  note(spec.element != base.element, "element", traits(spec.element).name);
  note(spec.square != base.square, "block", block_text(spec));
  note(spec.rule != base.rule, "scale_rule", to_string(spec.rule));
  note(spec.rounding != base.rounding, "rounding", to_string(spec.rounding));
  // Always printed for stochastic two-level specs, whose default is `up`, to be explicit.
  note(spec.two_level() && (spec.stochastic() || spec.scale_rounding != base.scale_rounding),
       "scale_rounding", to_string(spec.scale_rounding));
  note(spec.outer != base.outer, "outer", spec.outer ? "true" : "false");
  note(spec.hadamard.dim != 0, "hadamard",
       std::to_string(spec.hadamard.dim) + ":" + mask_text(spec.hadamard));
  return changes.empty() ? family.name : family.name + ("[" + join(changes, ",") + "]");
}

QuantSpec parse_spec(std::string_view text) {
  const size_t bracket = text.find('[');
  const std::string_view name = text.substr(0, bracket);
  std::vector<std::string> names;
  for (const Family& f : families()) {
    if (name == f.name) {
      if (bracket == std::string_view::npos) return f.spec;
      if (text.back() != ']') fail("spec", "text", quoted(text), "a closing ']'");
      return with_changes(f.spec, text.substr(bracket + 1, text.size() - bracket - 2));
    }
    names.push_back(f.name);
  }
  fail("spec", "name", quoted(name), "one of " + join(names, ", "), did_you_mean(name, names));
}

QuantSpec with_changes(const QuantSpec& base, std::string_view changes) {
  static const std::vector<std::string> kKeys = {
      "element", "block", "scale_rule", "rounding", "scale_rounding", "outer", "hadamard", "scale"};
  QuantSpec spec = base;
  const Family& family = family_of(base);
  if (changes.empty()) return base;
  std::vector<std::string_view> seen;
  for (std::string_view change : split(changes, ',')) {
    const size_t equals = change.find('=');
    const std::string_view key = change.substr(0, equals);
    const std::string_view value =
        equals == std::string_view::npos ? std::string_view() : change.substr(equals + 1);
    if (contains(seen, key)) fail("spec", "change", quoted(key), "each change once");
    seen.push_back(key);
    if (key == "element") {
      spec.element = parse_format(value, true);
    } else if (key == "block") {
      set_block(spec, value);
    } else if (key == "scale_rule") {
      spec.rule = static_cast<ScaleRule>(index_of(kRuleNames, value, "scale_rule"));
    } else if (key == "rounding") {
      spec.rounding = static_cast<Rounding>(index_of(kRoundingNames, value, "rounding"));
    } else if (key == "scale_rounding") {
      const int index = index_of(kScaleRoundingNames, value, "scale_rounding");
      spec.scale_rounding = static_cast<ScaleRounding>(index);
    } else if (key == "outer") {
      spec.outer = parse_bool(value, "outer");
    } else if (key == "hadamard") {
      spec.hadamard = parse_hadamard(value);
    } else if (key == "scale") {
      check_scale(family, spec, value);
    } else {
      fail("spec", "change", quoted(key), "one of " + join(kKeys, ", "), did_you_mean(key, kKeys));
    }
  }
  check_family_has(family, spec);
  if (spec.two_level() && spec.rounding != base.rounding &&
      !contains<std::string_view>(seen, "scale_rounding"))
    spec.scale_rounding = spec.stochastic() ? ScaleRounding::up : ScaleRounding::nearest;
  validate(spec);
  return spec;
}

}  // namespace blockscale
