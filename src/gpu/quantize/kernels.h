// The quantizers that are compiled. The parts of the table are files of their own, which compile
// side by side.
#pragma once

#include <span>

#include "gpu/launch.h"

namespace blockscale::gpu {

// Kernels of inputs with contiguous columns: what recipes ask for, along rows, along columns, or
// both at once. Whatever is not in the table, or null, runs as `any`.
//
// BLOCKSCALE_SAMPLE leaves out those that differ by a format alone: what is compiled for a chip
// without being run there, or under sanitizers, has one of each kind.
struct Floats {
  Launcher<QuantizeParams> matrix = nullptr, grouped = nullptr;
};
struct Entry {
  Pass row, column;
  Launcher<QuantizeParams> aligned, unaligned, grouped;  // of BF16; groups of aligned rows
  Floats floats;                                         // of FP32 and FP16
};
using Table = std::span<const Entry>;

std::span<const Table> fp8_kernels();
std::span<const Table> mxfp4_kernels();
std::span<const Table> nvfp4_kernels();

}  // namespace blockscale::gpu
