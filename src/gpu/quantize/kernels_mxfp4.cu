#include "gpu/quantize/instances.h"

namespace blockscale::gpu {

std::span<const Table> mxfp4_kernels() {
  static constexpr Table kTables[] = {
#if BLOCKSCALE_SAMPLE < 2
    Table(kFp4Entries<Format::e8m0>),
    Table(kWidenedEntries),
#else
    Table(&kColumns<Fp4Hadamard<Format::e8m0>>, 1),
#endif
  };
  return kTables;
}

}  // namespace blockscale::gpu
