#include "blockscale/layout.h"

#include <algorithm>

#include "blockscale/status.h"
#include "blockscale/tensor.h"
#include "text.h"

namespace blockscale {

StorageLayout parse_layout(std::string_view text) {
  StorageLayout layout;
  std::vector<std::string> names;
  for (const LayoutTraits& t : kLayouts) names.push_back(t.name);
  bool has_codes = false, has_scales = false;
  for (std::string_view name : split(text, '+')) {
    int index = 0;
    while (index < kLayoutCount && name != kLayouts[index].name) ++index;
    if (index == kLayoutCount)
      fail("layout", "name", quoted(name), "one of " + join(names, ", "),
           did_you_mean(name, names));
    const bool scales = kLayouts[index].for_scales;
    bool& taken = scales ? has_scales : has_codes;
    if (taken)
      fail("layout", "name", quoted(text), "at most one layout of codes and one of scales",
           "join them by '+', e.g. 'mfma_16x16+aiter_scale'");
    taken = true;
    (scales ? layout.scales : layout.codes) = static_cast<Layout>(index);
  }
  return layout;
}

std::string to_string(const StorageLayout& layout) {
  const std::string codes = traits(layout.codes).name;
  const std::string scales = traits(layout.scales).name;
  if (layout.codes == Layout::linear) return scales;
  return layout.scales == Layout::linear ? codes : codes + "+" + scales;
}

void validate(const QuantSpec& spec, const StorageLayout& layout) {
  for (const Layout l : {layout.codes, layout.scales})
    if (static_cast<int>(l) >= kLayoutCount)
      fail("layout", "enumerator", static_cast<int>(l), "one of " + std::to_string(kLayoutCount),
           "parse_layout() makes one of a name");
  const LayoutTraits scales = traits(layout.scales), codes = traits(layout.codes);
  const auto fits = [&](const LayoutTraits& t) {
    return t.for_scales && (t.scale_bytes == 0 || t.scale_bytes == scale_bytes(spec.scale));
  };
  if (!codes.for_codes)
    fail("layout", "codes", quoted(codes.name), "a layout of codes: linear or mfma_16x16");
  if (!scales.for_scales)
    fail("layout", "scales", quoted(scales.name),
         "a layout of scales: linear, mn_major, nv_128x4 or aiter_scale");
  if (!fits(scales)) {
    std::vector<std::string> names;
    for (const LayoutTraits& t : kLayouts)
      if (fits(t)) names.push_back(t.name);
    fail("layout", "scales", quoted(scales.name),
         "one of " + join(names, ", ") + " for the " + traits(spec.scale).name + " scales of " +
             to_string(spec));
  }
  if (layout.codes == Layout::mfma_16x16 && codes_per_byte(spec.element) != 2)
    fail("layout", "codes", quoted("mfma_16x16"), "packed FP4 codes",
         "use 'linear' for the codes of " + to_string(spec));
}

void check_sizes(const char* op, const char* name, int64_t rows, int64_t columns, int64_t batch,
                 int64_t groups) {
  // The most that a layout, a transform and a block add to an extent; bytes of a scale or code.
  constexpr int64_t kPadding = 4096, kBytes = 4, kLimit = int64_t{1} << 62;
  const auto times = [](int64_t a, int64_t b) {
    int64_t product = 0;
    return __builtin_mul_overflow(a, b, &product) || product > kLimit ? kLimit : product;
  };
  const auto plus = [&](int64_t a, int64_t b) { return a > kLimit - b ? kLimit : a + b; };
  // Each group may have its own padding.
  const int64_t padded_rows = plus(rows, times(plus(groups, 1), kPadding));
  const int64_t matrix = times(padded_rows, plus(columns, kPadding));
  if (times(times(matrix, std::max<int64_t>(batch, 1)), kBytes) < kLimit) return;
  fail(op, name,
       (batch == 1 ? "" : std::to_string(batch) + " matrices of ") + "[" + std::to_string(rows) +
           ", " + std::to_string(columns) + "]" +
           (groups ? " in " + std::to_string(groups) + " groups" : ""),
       "extents whose product, padded, is below 2^60", "quantize parts of it");
}

}  // namespace blockscale
