#include "gpu/quantize/instances.h"

namespace blockscale::gpu {

std::span<const Table> nvfp4_kernels() {
  static constexpr Table kTables[] = {
      Table(kFp4Entries<Format::e4m3>),
  };
  return kTables;
}

}  // namespace blockscale::gpu
