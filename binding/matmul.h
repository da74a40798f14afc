// D = A·Bᵀ + bias on the devices that can. The operands have been checked against their specs.
#pragma once

#include <optional>
#include <string>

#include "boundary.h"

namespace blockscale::binding {

Tensor matmul_on_cpu(const Place& at, const Operand& a, const Operand& b,
                     const std::optional<Tensor>& bias, ScalarType out_dtype);
Tensor matmul_on_gpu(const Place& at, const Operand& a, const Operand& b,
                     const std::optional<Tensor>& bias, ScalarType out_dtype);

// What a GEMM of operands of this spec still needs on a kind of device ("cpu", "cuda"); empty when
// it can run.
std::string matmul_needs(const QuantSpec& spec, std::string_view device);

}  // namespace blockscale::binding
