#include "layer.h"

#include <sstream>

namespace blockscale::binding {
namespace {

Recipe parse_recipe(const std::string& text) {
  std::istringstream words(text);
  std::vector<Spec> specs;
  for (std::string word; words >> word;)
    specs.push_back(word == "none" ? Spec() : Spec(parse_spec(word)));
  require(specs.size() == 6, "linear", "recipe", text, "six specs, or none in their place");
  for (size_t i = 0; i < specs.size(); i += 2)
    if (specs[i] && specs[i + 1]) validate_pair("linear", *specs[i], *specs[i + 1]);
  return {specs[0], specs[1], specs[2], specs[3], specs[4], specs[5]};
}

}  // namespace

const Recipe& recipe_of(const Text& text) { return parsed_once<parse_recipe>(text); }

Ints with_last(const Tensor& x, int64_t last) {
  Ints sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = last;
  return sizes;
}

Shard shard_of(const Context& at, const char* name, const std::optional<Tensor>& amax, int64_t row,
               int64_t column) {
  if (!amax) return {row, column};
  at.check(name, *amax);
  require(amax->scalar_type() == ScalarType::Float && amax->numel() == 2 && amax->is_contiguous(),
          at.op(), name, "another tensor", "float32 [2]");
  const auto* of = static_cast<const float*>(amax->const_data_ptr());
  return {row, column, of, of + 1};
}

bool is_gathered(const Tensor& first) {
  const ScalarType type = first.scalar_type();
  return first.dim() > 1 && type != ScalarType::Float && type != ScalarType::BFloat16 &&
         type != ScalarType::Half;
}
Operand gathered(const Context& at, const char* name, std::span<const Tensor> parts,
                 const Spec& spec, const Extent& e) {
  require(spec && spec->square && parts.size() == kGatheredParts, at.op(), name, parts.size(),
          "codes, scales and outer scale of a weight that the recipe quantizes in square blocks");
  require(parts[0].numel() == 0 || parts[0].const_data_ptr(), at.op(), name,
          "a weight whose memory FSDP2 has freed", "one that is gathered",
          "have FSDP2 unshard its module for the backward (set_unshard_in_backward)");
  return operand(at, std::string(name) + ".", parts[0], parts[1], parts[2], *spec, {}, -1, e, true);
}

}  // namespace blockscale::binding
