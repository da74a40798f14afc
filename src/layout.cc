#include "blockscale/layout.h"

#include "blockscale/status.h"
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
  const auto names = [](const auto& suits) {
    std::vector<std::string> all;
    for (const LayoutTraits& t : kLayouts)
      if (suits(t)) all.push_back(t.name);
    return join(all, ", ");
  };
  if (!codes.for_codes)
    fail("layout", "codes", quoted(codes.name),
         "a layout of codes: " + names([](const LayoutTraits& t) { return t.for_codes; }));
  if (!fits(scales))
    fail("layout", "scales", quoted(scales.name),
         "one of " + names(fits) + " for the " + traits(spec.scale).name + " scales of " +
             to_string(spec));
  if (layout.codes == Layout::mfma_16x16 && codes_per_byte(spec.element) != 2)
    fail("layout", "codes", quoted("mfma_16x16"), "packed FP4 codes",
         "use 'linear' for the codes of " + to_string(spec));
}

}  // namespace blockscale
