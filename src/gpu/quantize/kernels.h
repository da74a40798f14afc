// The table of compiled quantizers. Its parts are separate files, which compile in parallel.
#pragma once

#include <span>

#include "gpu/launch.h"
#include "gpu/quantize/walk.h"

namespace blockscale::gpu {

// Kernels for inputs with contiguous columns, as recipes ask for them: along rows, along columns,
// or both at once. Whatever is not in the table, or null, runs as `any`.
//
// A BLOCKSCALE_SAMPLE leaves some out: 1, where they run under sanitizers, those that differ only
// in a format; 2, for a chip on which none will run, all but a few, which have nearly all of
// the code between them.
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
