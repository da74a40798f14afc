// An operand of a quantizer as its kernels take it.
#pragma once

#include "gpu/quantize/scale.h"

namespace blockscale::gpu {

// One of the operands of an input, or none.
struct Output {
  const Quantized* to = nullptr;
  QuantizeOptions options{};
  int amax_parts = 0;

  // What is computed; `to` may be that widened.
  const QuantSpec& spec() const { return options.widened ? *options.widened : to->spec; }
  bool widens() const { return to && options.widened; }
  bool transforms() const { return spec().hadamard.dim != 0; }
  // Whether x is transformed before, to the workspace.
  bool needs_hadamard_pass() const { return to && spec().hadamard.dim > kRun; }
  bool lacks_amax() const { return to && to->spec.outer && !options.amax; }
};

// What kernels are chosen by; of none, the pass that is not present().
Pass pass_of(const QuantSpec& spec);
Pass pass_of(const Output& operand);

// Facts that kernels would otherwise compute again and again; of none, nothing.
Side side_of(const Output& operand);

}  // namespace blockscale::gpu
