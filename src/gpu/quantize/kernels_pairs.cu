#include "gpu/quantize/instances.h"
#include "gpu/quantize/pairs.h"

namespace blockscale::gpu {
namespace {

using enum Format;
using X8 = Fp8<Encoder::e4m3fn, fp32>;
using W8 = Fp8Square<Encoder::e4m3fn, fp32>;
using Mx8 = Fp8<Encoder::e4m3fn, e8m0>;

template <class RowA, class ColumnA, class RowB, class ColumnB>
constexpr PairEntry kPair{{RowA::kPass, RowB::kPass},
                          {ColumnA::kPass, ColumnB::kPass},
                          launch_pair<RowA, ColumnA, RowB, ColumnB>};
template <class Row, class W>
constexpr PairEntry kForward = kPair<Row, None, W, None>;
template <class Row, class Column, class W>
constexpr PairEntry kBoth = kPair<Row, Column, W, W>;

}  // namespace

std::span<const PairEntry> pair_kernels() {
  static constexpr PairEntry kEntries[] = {
    kForward<X8, W8>,
    kBoth<Fp4<e4m3>, Fp4Hadamard<e4m3>, Fp4Square<e4m3>>,
#if BLOCKSCALE_SAMPLE < 2
    kBoth<X8, X8, W8>,
    kBoth<X8, W8, W8>,
    kForward<Fp4<e4m3>, Fp4Square<e4m3>>,
#endif
#if BLOCKSCALE_SAMPLE < 1
    kForward<Mx8, Mx8>,
    kBoth<Mx8, Mx8, Mx8>,
    kForward<Fp4<e8m0>, Fp4Square<e8m0>>,
    kBoth<Fp4<e8m0>, Fp4Hadamard<e8m0>, Fp4Square<e8m0>>,
    kForward<Fp4Widened, Fp4Square<e8m0>>,
    kBoth<Fp4Widened, Fp4Hadamard<e8m0>, Fp4Square<e8m0>>,
    kForward<Fp4<ue5m3>, Fp4Square<ue5m3>>,
    kBoth<Fp4<ue5m3>, Fp4Hadamard<ue5m3>, Fp4Square<ue5m3>>,
#endif
  };
  return kEntries;
}

}  // namespace blockscale::gpu
