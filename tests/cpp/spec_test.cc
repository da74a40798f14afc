// Specs: the named ones, their text, their refusals, and what is usable at compile time.
#include "blockscale/spec.h"

#include <gtest/gtest.h>

#include <set>

#include "blockscale/hadamard.h"
#include "blockscale/layout.h"
#include "blockscale/philox.h"
#include "blockscale/rounding.h"
#include "specs.h"
#include "text.h"
#include "throws.h"

namespace blockscale::testing {
namespace {

TEST(Spec, TheFamiliesAreTheTableOfSection9) {
  ASSERT_EQ(families().size(), family_rows().size());
  for (size_t i = 0; i < families().size(); ++i) {
    const Family& got = families()[i];
    const FamilyRow& want = family_rows()[i];
    EXPECT_STREQ(got.name, want.name);
    EXPECT_EQ(got.spec.element, want.elements[0]) << want.name;
    EXPECT_EQ(got.spec.scale, want.scale) << want.name;
    EXPECT_EQ(got.spec.block, want.block) << want.name;
    EXPECT_EQ(got.spec.square, want.square) << want.name;
    EXPECT_EQ(got.spec.rule, want.rules[0]) << want.name;
    EXPECT_EQ(got.spec.outer, want.rules[0] == ScaleRule::two_level) << want.name;
    EXPECT_EQ(got.spec.rounding, Rounding::nearest) << want.name;
    EXPECT_EQ(got.spec.scale_rounding, ScaleRounding::nearest) << want.name;
    EXPECT_EQ(got.spec.hadamard, Hadamard{}) << want.name;
    EXPECT_EQ(parse_spec(want.name), got.spec);
    EXPECT_EQ(to_string(got.spec), want.name);
    validate(got.spec);
  }
}

TEST(SpecText, EveryValidSpecComesBackFromItsText) {
  ASSERT_GT(valid_specs().size(), 500u);
  std::set<std::string> texts;
  for (const QuantSpec& spec : valid_specs()) {
    validate(spec);
    const std::string text = to_string(spec);
    EXPECT_TRUE(texts.insert(text).second) << text << " names two specs";
    const QuantSpec back = parse_spec(text);
    EXPECT_EQ(back, spec) << text;
    EXPECT_EQ(to_string(back), text);
  }
}

TEST(SpecText, EveryCombinationThatMeansNothingIsRefused) {
  for (const FamilyRow& row : family_rows())
    for (const QuantSpec& spec : combinations(row))
      if (!means_something(spec)) {
        EXPECT_ERROR(validate(spec), "spec");
      }
}

TEST(SpecText, TheFormIsTheFamilyAndWhatDiffers) {
  const std::pair<const char*, const char*> written[] = {
      {"nvfp4", "nvfp4"},
      {"nvfp4[]", "nvfp4"},
      {"nvfp4[block=1x16]", "nvfp4"},
      {"nvfp4[block=16x16]", "nvfp4[block=16x16]"},
      {"fp8_1x128[element=e5m2]", "fp8_1x128[element=e5m2]"},
      {"fp8_128x128[scale_rule=pow2]", "fp8_128x128[scale_rule=pow2]"},
      {"mxfp8[scale_rule=floor,block=32x32]", "mxfp8[block=32x32,scale_rule=floor]"},
      {"mxfp4[scale_rule=even]", "mxfp4"},
      {"amdfp4[outer=false]", "amdfp4[outer=false]"},
      {"nvfp4[hadamard=16]", "nvfp4[hadamard=16:0xd7e8]"},
      {"mxfp4[hadamard=64]", "mxfp4[hadamard=64:0x0]"},
      {"mxfp4[hadamard=16:0]", "mxfp4[hadamard=16:0x0]"},
      {"nvfp4[hadamard=16:0xD7E8]", "nvfp4[hadamard=16:0xd7e8]"},
      {"nvfp4[hadamard=none]", "nvfp4"},
      {"nvfp4[hadamard=0]", "nvfp4"},
      {"nvfp4[rounding=stochastic]", "nvfp4[rounding=stochastic,scale_rounding=up]"},
      {"nvfp4[scale_rounding=nearest,rounding=stochastic]",
       "nvfp4[rounding=stochastic,scale_rounding=nearest]"},
      {"mxfp4[rounding=stochastic,scale_rule=rceil]",
       "mxfp4[scale_rule=rceil,rounding=stochastic]"},
      {"nvfp4[scale=e4m3]", "nvfp4"},
  };
  for (const auto& [text, canonical] : written)
    EXPECT_EQ(to_string(parse_spec(text)), canonical) << text;
}

TEST(SpecText, ChangesApplyToAnySpec) {
  const QuantSpec stochastic = with_changes(kNvfp4, "rounding=stochastic");
  EXPECT_EQ(stochastic.scale_rounding, ScaleRounding::up);
  EXPECT_EQ(with_changes(stochastic, "rounding=nearest"), kNvfp4);
  EXPECT_EQ(with_changes(stochastic, "block=16x16").scale_rounding, ScaleRounding::up);
  const QuantSpec parity = with_changes(stochastic, "scale_rounding=nearest");
  EXPECT_EQ(parity.scale_rounding, ScaleRounding::nearest);
  EXPECT_EQ(with_changes(parity, "block=16x16").scale_rounding, ScaleRounding::nearest);
  EXPECT_EQ(with_changes(kNvfp4, ""), kNvfp4);
  EXPECT_EQ(with_changes(kMxfp8, "rounding=stochastic").scale_rounding, ScaleRounding::nearest);
}

TEST(SpecRefusal, UnknownNamesNameTheNearest) {
  EXPECT_ERROR(parse_spec("nvpf4"), "'nvpf4'", "nvfp4", "did you mean 'nvfp4'?");
  EXPECT_ERROR(parse_spec("mxfp9"), "did you mean 'mxfp");
  EXPECT_ERROR(parse_spec(""), "one of fp8_1x128");
  EXPECT_ERROR(parse_spec("nvfp4[element=e2m2]"), "'e2m2'", "did you mean 'e2m");
  EXPECT_ERROR(parse_spec("nvfp4[colour=red]"), "'colour'", "one of element");
  EXPECT_ERROR(parse_spec("nvfp4[rounding=random]"), "'random'", "nearest, stochastic");
  EXPECT_ERROR(parse_spec("mxfp8[scale_rule=cell]"), "'cell'", "did you mean 'ceil'?");
  EXPECT_ERROR(parse_spec("nvfp4[scale_rounding=down]"), "'down'", "nearest, up");
  EXPECT_ERROR(parse_spec("NVFP4"), "did you mean 'nvfp4'?");
}

TEST(SpecRefusal, NamesLikeNoOtherGetNoSuggestion) {
  for (const char* text : {"nvfp4[foo=1]", "nonsense", ""}) {
    try {
      parse_spec(text);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_EQ(std::string_view(error.what()).find("did you mean"), std::string_view::npos);
    }
  }
}

TEST(SpecRefusal, BrokenTextIsNotGuessedAt) {
  EXPECT_ERROR(parse_spec("nvfp4[block=16x16"), "]");
  EXPECT_ERROR(parse_spec("nvfp4["), "]");
  EXPECT_ERROR(parse_spec("nvfp4]"), "nvfp4");
  EXPECT_ERROR(parse_spec("nvfp4[block=16x16]]"), "block");
  EXPECT_ERROR(parse_spec("nvfp4[block=16x16] "), "]");
  EXPECT_ERROR(parse_spec(" nvfp4"), "did you mean 'nvfp4'?");
  EXPECT_ERROR(parse_spec("nvfp4[,]"), "''");
  EXPECT_ERROR(parse_spec("nvfp4[block]"), "block");
  EXPECT_ERROR(parse_spec("nvfp4[outer]"), "outer = ''");
  EXPECT_ERROR(parse_spec("nvfp4[outer=yes]"), "outer", "true or false");
  EXPECT_ERROR(parse_spec("nvfp4[outer=true,outer=false]"), "'outer'", "each change once");
}

TEST(SpecText, AsPythonAndPyTorchSpell) {
  EXPECT_EQ(parse_spec("nvfp4[outer=False]"), parse_spec("nvfp4[outer=false]"));
  EXPECT_EQ(parse_spec("nvfp4[outer=True]"), parse_spec("nvfp4[outer=true]"));
  EXPECT_EQ(parse_spec("mxfp8[element=torch.float8_e5m2]"), parse_spec("mxfp8[element=e5m2]"));
  EXPECT_EQ(parse_spec("mxfp8[element=float8_e4m3fn]"), parse_spec("mxfp8"));
}

// A suggestion is at most half of the longer word away.
TEST(SpecRefusal, SuggestsWhatIsNear) {
  for (const auto& [name, candidate] : {std::pair{"abcd", "abxy"}, std::pair{"ab", "xaby"},
                                        std::pair{"xaby", "ab"}, std::pair{"ABXZ", "abyz"}})
    EXPECT_EQ(did_you_mean(name, {candidate}), "did you mean " + quoted(candidate) + "?") << name;
  for (const auto& [name, candidate] :
       {std::pair{"abc", "axy"}, std::pair{"a", "xay"}, std::pair{"xay", "a"}})
    EXPECT_EQ(did_you_mean(name, {candidate}), "") << name;
  EXPECT_EQ(did_you_mean("A", {"b", "a"}), "did you mean 'a'?");
  EXPECT_EQ(did_you_mean("Z", {"b", "z"}), "did you mean 'z'?");
}

// What goes on where the name ends is meant, though another may be nearer.
TEST(SpecRefusal, SuggestsWhatBeginsWithTheName) {
  EXPECT_ERROR(parse_spec("mxfp8[element=e4m3]"), "did you mean 'e4m3fn'?");
  EXPECT_ERROR(parse_spec("mxfp8[element=E4M3FN]"), "did you mean 'e4m3fn'?");
}

TEST(SpecRefusal, ElementsScalesAndBlocksBelongToTheFamily) {
  EXPECT_ERROR(parse_spec("nvfp4[element=e4m3fn]"), "e4m3fn", "e2m1", "nvfp4");
  EXPECT_ERROR(parse_spec("mxfp8[element=e2m1]"), "e2m1", "mxfp8", "use 'mxfp4'");
  EXPECT_ERROR(parse_spec("mxfp6[element=e5m2]"), "e5m2", "use 'mxfp8'");
  EXPECT_ERROR(parse_spec("nvfp4[element=e4m3]"), "e4m3");  // a scale format
  EXPECT_ERROR(parse_spec("nvfp4[scale=ue5m3]"), "ue5m3", "e4m3 for nvfp4", "use 'amdfp4'");
  EXPECT_ERROR(parse_spec("mxfp4[scale=e4m3]"), "use 'nvfp4'");
  EXPECT_ERROR(parse_spec("nvfp4[scale=fp32]"), "what the name means");  // none has e2m1
  EXPECT_ERROR(parse_spec("nvfp4[scale=e9m9]"), "'e9m9'");
  EXPECT_ERROR(parse_spec("nvfp4[scale_rule=rceil]"), "rceil", "two_level", "nvfp4");
  EXPECT_ERROR(parse_spec("mxfp8[scale_rule=two_level]"), "two_level", "mxfp8");
  EXPECT_ERROR(parse_spec("mxfp8[scale_rule=amax]"), "amax", "e8m0");
  for (const char* block : {"1x32", "32", "16x32", "32x16", "0x16", "16x0", "x16", "16x", "-1x16",
                            "1x16x16", "1x4294967312", "", "1 x16"})
    EXPECT_ERROR(parse_spec(std::string("nvfp4[block=") + block + "]"), "block", "1x16 or 16x16");
}

TEST(SpecRefusal, OuterScalesAndRoundedScalesAreTwoLevel) {
  EXPECT_ERROR(parse_spec("mxfp8[outer=true]"), "outer", "two-level");
  EXPECT_ERROR(parse_spec("fp8_1x128[outer=true]"), "outer", "two-level");
  EXPECT_ERROR(parse_spec("mxfp4[scale_rounding=up]"), "scale_rounding", "two-level");
}

TEST(SpecRefusal, StochasticRoundingNeedsARuleThatDoesNotSaturate) {
  EXPECT_ERROR(parse_spec("mxfp4[rounding=stochastic]"), "scale_rule = even", "ceil or rceil",
               "saturate", "scale_rule=rceil");
  EXPECT_ERROR(parse_spec("mxfp8[rounding=stochastic,scale_rule=floor]"), "scale_rule = floor");
  for (const char* fine :
       {"mxfp8[rounding=stochastic]", "mxfp4[rounding=stochastic,scale_rule=ceil]",
        "fp8_1x128[rounding=stochastic]", "amdfp4[rounding=stochastic]"})
    EXPECT_TRUE(parse_spec(fine).stochastic()) << fine;
}

TEST(SpecRefusal, HadamardSizesAndMasks) {
  for (const char* h :
       {"8", "0:0xd7e8", "17", "256", "-16", "16.0", "", "true", "16:", "16:0x", "16:xyz",
        "4294967312", "65552", "16:0x10000", "32:0x100000000", "16:65536", "64:0x10000000000000000",
        "128:0x100000000000000000000000000000000", "128:0xzz0000000000000001"})
    EXPECT_ERROR(parse_spec(std::string("nvfp4[hadamard=") + h + "]"), "hadamard", h);
  EXPECT_EQ(parse_spec("nvfp4[hadamard=128:0x80000000000000000000000000000001]").hadamard,
            (Hadamard{128, 1, uint64_t{1} << 63}));
  EXPECT_EQ(parse_spec("nvfp4[hadamard=128:0x10000000000000002]").hadamard, (Hadamard{128, 2, 1}));
  EXPECT_EQ(parse_spec("nvfp4[hadamard=128:0X80000000000000000000000000000001]").hadamard,
            (Hadamard{128, 1, uint64_t{1} << 63}));
  EXPECT_EQ(parse_spec("nvfp4[hadamard=16:55272]").hadamard, (Hadamard{16, 0xD7E8, 0}));
  EXPECT_EQ(parse_spec("nvfp4[hadamard=16:0XD7E8]").hadamard, (Hadamard{16, 0xD7E8, 0}));
  EXPECT_EQ(parse_spec("nvfp4[hadamard=64:18446744073709551615]").hadamard,
            (Hadamard{64, UINT64_MAX, 0}));
  QuantSpec odd = kNvfp4;
  odd.hadamard = {0, 1, 0};
  EXPECT_ERROR(validate(odd), "hadamard");
  odd.hadamard = {16, 0, 1};
  EXPECT_ERROR(validate(odd), "hadamard");
}

TEST(SpecRefusal, SpecsPutTogetherByHandAreCheckedToo) {
  QuantSpec spec = kNvfp4;
  spec.block = 32;
  EXPECT_ERROR(validate(spec), "block", "16");
  spec = kMxfp8;
  spec.scale = Format::e4m3;
  EXPECT_ERROR(validate(spec), "e4m3");
  spec = kMxfp8;
  spec.element = Format::e8m0;
  EXPECT_ERROR(validate(spec), "e8m0");
  spec = kFp8_1x128;
  spec.rule = ScaleRule::rceil;
  EXPECT_ERROR(validate(spec), "scale_rule", "rceil");
}

TEST(SpecRefusal, PairsThatNoGemmMultiplies) {
  const auto pair = [](const Hadamard& a, const Hadamard& b) {
    QuantSpec left = kNvfp4, right = kNvfp4;
    left.hadamard = a, right.hadamard = b;
    validate_pair("gemm", left, right);
  };
  pair({128, 1, 2}, {128, 1, 2});
  for (const Hadamard& other : {Hadamard{128, 1, 3}, Hadamard{128, 2, 2}, Hadamard{64, 1, 0}})
    EXPECT_ERROR(pair({128, 1, 2}, other), "gemm: b = nvfp4", "Hadamard transform of a");
  EXPECT_ERROR(pair({64, 1, 0}, {128, 1, 0}), "gemm: b = nvfp4", "Hadamard transform of a");
  EXPECT_ERROR(validate_pair("gemm", kMxfp4, kNvfp4), "gemm: b = nvfp4", "blocks of 32");
  EXPECT_ERROR(validate_pair("gemm", kNvfp4, kMxfp4), "gemm: b = mxfp4", "blocks of 16");
}

// As of a file that is read: none of them may be looked up.
TEST(SpecRefusal, NumbersThatAreNoEnumerators) {
  const auto refused = [](auto QuantSpec::*field, int count) {
    for (const int number : {count, 99}) {
      QuantSpec spec = kNvfp4;
      spec.*field = static_cast<std::remove_reference_t<decltype(spec.*field)>>(number);
      const std::string got = "= " + std::to_string(number) + "; need one of ";
      EXPECT_ERROR(validate(spec), got);
      EXPECT_ERROR(to_string(spec), got);
    }
  };
  refused(&QuantSpec::element, kFormatCount);
  refused(&QuantSpec::scale, kFormatCount);
  refused(&QuantSpec::rule, 7);
  refused(&QuantSpec::rounding, 2);
  refused(&QuantSpec::scale_rounding, 2);
}

// A spec as a template argument; everything a kernel needs is known at compile time.
template <QuantSpec kSpec>
struct Kernel {
  static constexpr float kLargest = max_value(kSpec.element);
  static constexpr int kBlock = kSpec.block, kLines = kSpec.block_lines();
  static constexpr bool kStochastic = kSpec.stochastic(), kTwoLevel = kSpec.two_level();
};
static_assert(Kernel<kNvfp4>::kLargest == 6 && Kernel<kNvfp4>::kTwoLevel);
static_assert(Kernel<kFp8_128x128>::kLines == 128 && Kernel<kMxfp8>::kLines == 1);
static_assert(Kernel<QuantSpec{.element = Format::e5m2}>::kLargest == 57344);
constexpr QuantSpec kRotated{.element = Format::e2m1,
                             .scale = Format::e4m3,
                             .block = 16,
                             .rule = ScaleRule::two_level,
                             .rounding = Rounding::stochastic,
                             .outer = true,
                             .hadamard = {16, kDefaultSigns16, 0}};
static_assert(Kernel<kRotated>::kStochastic && kRotated.hadamard.negates(15) &&
              !kRotated.hadamard.negates(0));

static_assert(encode(Format::e4m3fn, 449.0f) == 0x7E && decode(Format::e4m3fn, 0x7E) == 448);
static_assert(encode(Format::e2m1, -5.0f) == 0xE && decode(Format::e2m1, 0xE) == -4);
static_assert(encode_magnitude(traits(Format::ue5m3), 1.01f, RoundingDirection::up) == 0x79);
static_assert(encode_magnitude_stochastic(traits(Format::e2m1), 6, 2.75f, 64) == 5 &&
              encode_magnitude_stochastic(traits(Format::e2m1), 6, 2.75f, 63) == 4);
static_assert(e8m0_byte(ScaleRule::rceil, Format::e4m3fn, 448) == 127 &&
              e8m0_byte(ScaleRule::floor, Format::e2m1, 6) == 127 && e8m0_inv(130) == 0.125f);
static_assert(amax_scale(448, 448).scale == 1 && pow2_scale(449, 448).scale == 2);
static_assert(outer_scale(Format::e4m3, 2688).enc == 1 && outer_scale(Format::e4m3, 0).dec == 1);
static_assert(two_level_scale(Format::e4m3, ScaleRounding::nearest, 6, {1, 1}).code == 0x38);
static_assert(two_level_scale(Format::e4m3, ScaleRounding::nearest, 0, {1, 1}).enc == kFloatMax);
static_assert(to_bf16(1.0f) == 0x3F80 && from_fp16(0x3C00) == 1 && to_fp16(65520) == 0x7C00);
static_assert(philox4x32<7>({{0, 0, 0, 0}}, 0, 0).word[0] == 0x5f6fb709);
static_assert(random_byte(random_block({1, 2}, 1, 3, 4), 5) < 256);
static_assert(layout_offset(Layout::nv_128x4, 256, 8, 200, 5) == 1673);
static_assert(stored_shape(kNvfp4, {}, -2, 33, 5).code_bytes == 5 * 24);
constexpr float first_of_transformed_ones() {
  float x[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  hadamard_block({16, 0, 0}, x);
  return x[0];
}
static_assert(first_of_transformed_ones() == 4);

}  // namespace
}  // namespace blockscale::testing
