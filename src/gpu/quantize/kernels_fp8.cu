#include "gpu/quantize/instances.h"

namespace blockscale::gpu {

std::span<const Table> fp8_kernels() {
  static constexpr Table kTables[] = {
    Table(kFp8Entries<Encoder::e4m3fn, Format::fp32>),
    Table(kFp8MixedEntries<Encoder::e4m3fn, Format::fp32>),
#if BLOCKSCALE_SAMPLE < 2
    Table(kFp8Entries<Encoder::byte, Format::e8m0>),
#else
    Table(&kColumns<Fp8<Encoder::byte, Format::e8m0>>, 1),
#endif
#if BLOCKSCALE_SAMPLE < 1
    Table(kFp8Entries<Encoder::e4m3fn, Format::e8m0>),
    Table(kFp8Entries<Encoder::e5m2, Format::fp32>),
    Table(kFp8Entries<Encoder::e5m2, Format::e8m0>),
    Table(kFp8Entries<Encoder::byte, Format::fp32>),
#endif
  };
  return kTables;
}

}  // namespace blockscale::gpu
