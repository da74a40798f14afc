#include "gpu/quantize/instances.h"

namespace blockscale::gpu {

std::span<const Table> mxfp4_kernels() {
  static constexpr Table kTables[] = {
      Table(kFp4Entries<Format::e8m0>),
  };
  return kTables;
}

}  // namespace blockscale::gpu
