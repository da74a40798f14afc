#include "gpu/quantize/instances.h"

namespace blockscale::gpu {

std::span<const Table> nvfp4_kernels() {
  static constexpr Table kTables[] = {
    Table(kFp4Entries<Format::e4m3>),
#if BLOCKSCALE_SAMPLE < 1
    Table(kFp4Entries<Format::ue5m3>),
#endif
  };
  return kTables;
}

}  // namespace blockscale::gpu
