// Vector forms of the scale rules (specification, section 4), one block per lane.

#if defined(BLOCKSCALE_SCALES_INL) == defined(HWY_TARGET_TOGGLE)
#ifdef BLOCKSCALE_SCALES_INL
#undef BLOCKSCALE_SCALES_INL
#else
#define BLOCKSCALE_SCALES_INL
#endif

#include "blockscale/spec.h"
#include "cpu/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace blockscale::cpu::HWY_NAMESPACE {

// The scale of each block, as a code or as FP32 bits, and the multiplier for its elements.
struct BlockScales {
  VU stored;
  VF inv;
};

HWY_INLINE BlockScales float_scales(const QuantSpec& spec, VF amax) {
  const DF df;
  const DU du;
  const float fmax = max_value(spec.element);
  const VF a = hn::Max(amax, hn::Set(df, kAmaxFloor));
  if (spec.rule == ScaleRule::amax) {
    const VF inv = hn::Div(hn::Set(df, fmax), a);
    return {hn::BitCast(du, hn::Div(hn::Set(df, 1.0f), inv)), inv};
  }
  // pow2_scale() in exponent fields: e = field(a) - field(FMAX) + 127, plus one if FMAX * 2^e < a.
  const uint32_t fmax_field = bit_cast<uint32_t>(fmax) >> 23;
  const VU e = hn::Add(hn::ShiftRight<23>(hn::BitCast(du, a)), hn::Set(du, 127 - fmax_field));
  const VF product = hn::Mul(hn::Set(df, fmax), hn::BitCast(df, hn::ShiftLeft<23>(e)));
  const auto up = hn::RebindMask(du, hn::Lt(product, a));
  const VU field = hn::Add(e, hn::IfThenElseZero(up, hn::Set(du, 1)));
  const VU scale = hn::ShiftLeft<23>(field);
  return {scale, hn::Div(hn::Set(df, 1.0f), hn::BitCast(df, scale))};
}

HWY_INLINE BlockScales e8m0_scales(const QuantSpec& spec, VF amax) {
  const DF df;
  const DU du;
  const hn::RebindToSigned<DU> di;
  const FormatTraits t = traits(spec.element);
  const float fmax = max_value(spec.element);
  const int p = static_cast<int>(bit_cast<uint32_t>(fmax) >> 23) - 127;
  const VU fraction_mask = hn::Set(du, 0x7FFFFF);
  const auto one_if = [&](hn::Mask<DU> mask) { return hn::IfThenElseZero(mask, hn::Set(du, 1)); };
  VU bits = hn::BitCast(du, amax);
  VU byte;
  if (spec.rule == ScaleRule::rceil) {
    bits = hn::BitCast(du, hn::Mul(amax, hn::Set(df, 1.0f / fmax)));
    const VU e = hn::ShiftRight<23>(bits);
    const VU threshold = hn::IfThenElseZero(hn::Eq(e, hn::Zero(du)), hn::Set(du, 0x400000));
    byte = hn::Add(e, one_if(hn::Gt(hn::And(bits, fraction_mask), threshold)));
  } else {
    if (spec.rule == ScaleRule::even)
      bits = hn::Add(bits, hn::Set(du, 1u << (23 - t.mantissa_bits - 1)));
    byte = hn::ShiftRight<23>(bits);
    if (spec.rule == ScaleRule::ceil)
      byte = hn::Add(byte, one_if(hn::Gt(hn::And(bits, fraction_mask), hn::Zero(du))));
    byte = hn::Sub(byte, hn::Set(du, static_cast<uint32_t>(p)));
  }
  // The byte is at most 255 - p, and p >= 2, so 2^(127 - byte), of exponent field 254 - byte, is
  // normal.
  byte = hn::BitCast(du, hn::Max(hn::BitCast(di, byte), hn::Zero(di)));
  return {byte, hn::BitCast(df, hn::ShiftLeft<23>(hn::Sub(hn::Set(du, 254), byte)))};
}

struct TwoLevelScales {
  TwoLevelScales(const QuantSpec& spec, OuterScale outer)
      : up(spec.scale_rounding != ScaleRounding::nearest),
        encoder(spec.scale),
        decoder(spec.scale),
        mask(hn::Set(DU(), traits(spec.scale).magnitude_mask())),
        enc(hn::Set(DF(), outer.enc * (1.0f / kE2m1Max))),
        dec(hn::Set(DF(), outer.dec)) {}
  // The specification's encode_scale (section 4): nearest even or up; amax >= 0, saturating.
  HWY_INLINE VU encode(VF wanted) const {
    const DU du;
    const VU code = hn::And(encoder.nearest(wanted), mask);
    if (!up) return code;
    const VF clamped = hn::Min(wanted, encoder.largest);
    const auto below = hn::RebindMask(du, hn::Lt(decoder(code), clamped));
    return hn::Add(code, hn::IfThenElseZero(below, hn::Set(du, 1)));
  }
  HWY_INLINE BlockScales operator()(VF amax) const {
    const DF df;
    const VU code = encode(hn::Mul(amax, enc));
    const VF decoded = hn::Mul(decoder(code), dec);
    return {code, hn::Min(hn::Div(hn::Set(df, 1.0f), decoded), hn::Set(df, kFloatMax))};
  }
  bool up;
  Encoder<3> encoder;
  Decoder<3> decoder;
  VU mask;
  VF enc, dec;
};

// block_scales() with `rule`, amax -> BlockScales.
template <class Rule>
HWY_INLINE bool apply_rule(const Rule& rule, uint32_t nan_scale, bool tensor_finite,
                           const uint32_t* amax_bits, size_t count, uint32_t* stored, float* inv) {
  const DF df;
  const DU du;
  const VU nan = hn::Set(du, nan_scale);
  const VU limit = hn::Set(du, tensor_finite ? kInfBits : 0);
  VU most = hn::Zero(du);
  for (size_t i = 0; i < count; i += lanes()) {
    const VU bits = hn::LoadU(du, amax_bits + i);
    const auto finite = hn::Lt(bits, limit);
    const BlockScales s = rule(hn::BitCast(df, hn::IfThenElseZero(finite, bits)));
    hn::StoreU(hn::IfThenElse(finite, s.stored, nan), du, stored + i);
    hn::StoreU(hn::IfThenElseZero(hn::RebindMask(df, finite), s.inv), df, inv + i);
    most = hn::Max(most, bits);
  }
  return !hn::AllTrue(du, hn::Lt(most, limit));
}

// Scales of `count` blocks from the bits of their amaxes. A non-finite block stores the NaN scale;
// its inv is 0, and the caller must clear its codes. Returns whether any block is non-finite. The
// arrays must be readable and writable up to a multiple of 16.
HWY_INLINE bool block_scales(const QuantSpec& spec, OuterScale outer, bool tensor_finite,
                             const uint32_t* amax, size_t count, uint32_t* stored, float* inv) {
  const uint32_t nan = spec.scale == Format::fp32 ? kNanBits : traits(spec.scale).nan_code();
  const auto apply = [&](const auto& rule) HWY_ATTR {
    return apply_rule(rule, nan, tensor_finite, amax, count, stored, inv);
  };
  if (spec.two_level()) return apply(TwoLevelScales(spec, outer));
  if (spec.scale == Format::e8m0) return apply([&](VF a) HWY_ATTR { return e8m0_scales(spec, a); });
  return apply([&](VF a) HWY_ATTR { return float_scales(spec, a); });
}

}  // namespace blockscale::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
