// The quantizers that are compiled. The parts of the table are files of their own, which compile
// side by side.
#pragma once

#include <span>

#include "gpu/launch.h"

namespace blockscale::gpu {

using Launcher = void (*)(QuantizeParams&, NativeStream);

// A kernel of BF16 inputs: what recipes ask for, along rows, along columns, or both at once.
// Whatever is not in the table runs as `any`.
struct Entry {
  Pass row, column;
  Launcher aligned, unaligned;
  Launcher grouped;  // of aligned rows that the copy engine reads, or null
};
using Table = std::span<const Entry>;

std::span<const Table> fp8_kernels();
std::span<const Table> mxfp4_kernels();
std::span<const Table> nvfp4_kernels();

}  // namespace blockscale::gpu
