// The operands of a linear layer: what is made of its tensors, and what was made before.
#pragma once

#include <optional>

#include "boundary.h"
#include "gpu/gpu.h"

namespace blockscale::binding {

using Spec = std::optional<QuantSpec>;  // none: high precision

// How the operands of a layer are stored: as GEMMs read them. FP32 scales lie transposed, which is
// how Hopper's FP8 GEMM brings them in; everything else is linear.
StorageLayout gemm_layout(const QuantSpec& spec);

// One operand of a GEMM, quantized or a high-precision matrix, which runs along the contraction
// axis or, with axis -2, down it.
struct GemmOperand {
  std::optional<Tensor> memory;  // what was handed in: the matrix, or what the others lie in
  int axis;
  std::optional<ConstQuantized> view;
  std::optional<gpu::WidenedOperand> widened{};  // in the place of `view`: see is_stored_widened()
};

// A quantized operand without memory, and how many bytes its parts take.
struct OperandPlan {
  OperandPlan(const QuantSpec& spec, int axis, const Extent& e);

  Quantized q;
  int64_t codes, outer, scales;
};

// What outlives a call, in one tensor of bytes: codes of up to two operands, the offset of random
// bits, outer scales, block scales. Codes come in whole blocks of 8 bytes or more, so that what
// follows them is aligned; those of the second operand start where kernels read fast, and what may
// lie before them is 0.
class SavedOperands {
 public:
  SavedOperands(const OperandPlan* first, const OperandPlan* second = nullptr, bool offset = false);
  int64_t bytes() const { return bytes_; }
  void allocate(const Context& at);
  // As an earlier call has filled it.
  void read(const Context& at, const char* name, const Tensor& saved);

  Tensor memory;
  Quantized view[2];
  int64_t* offset = nullptr;

 private:
  void place();

  const OperandPlan* plans_[2];
  bool has_offset_;
  int64_t second_ = 0, bytes_ = 0;  // where the codes of the second begin; all
};

// Whether a weight made ahead lies as the GEMM of the current GPU reads it, for products with
// operands of spec `a` whose rows are in `groups` groups (0: none): one in MXFP4 is widened then,
// once for all calls.
bool is_stored_widened(const Context& at, const Spec& a, const Spec& weight, int64_t groups);
// Whether the left operand of a product, on whose right is one of spec `b`, is made in that form
// too: by the quantizer itself, where a kernel is compiled for it. `groups` divide its rows or,
// where `rows` is given, a contraction axis of that length.
bool is_quantized_widened(const Context& at, const Spec& a, const Spec& b, int64_t groups,
                          int64_t rows = 0);
// An operand that an earlier call has made alone.
GemmOperand saved_operand(const Context& at, const char* name, const Tensor& saved,
                          const QuantSpec& spec, int axis, const Extent& e);
// The same of a weight, which may lie widened; without a spec `saved` itself, which has been
// checked.
GemmOperand weight_of(const Context& at, const char* name, const Tensor& saved, const Spec& a,
                      const Spec& weight, int axis, const Extent& e, int64_t groups);

// x [..., K] as one matrix.
Tensor matrix(const Tensor& x);

// Whether an operand is made, and whether it is read by this call alone or handed out: then it
// waits for memory from outside.
enum class Lifetime { none, call, saved };
inline Lifetime for_call_if(bool wanted) { return wanted ? Lifetime::call : Lifetime::none; }
inline Lifetime saved_if(bool wanted) { return wanted ? Lifetime::saved : Lifetime::none; }
// How an operand is to be made.
struct OperandRequest {
  const Spec& spec;
  Lifetime lifetime;
  bool widens = false;  // see is_quantized_widened()
};

// Where a piece of a larger matrix starts in it, and, for specs with an outer scale, the largest
// |x| of the whole one, as its operands along the rows and down the columns see it; null: the piece
// is the whole.
struct Shard {
  int64_t row = 0, column = 0;
  const float *row_amax = nullptr, *column_amax = nullptr;
};

// What the random bits of one operand are keyed by: the layer's seed, from which each operand
// derives its own (docs/rng.md), and the offset.
enum class Role : uint64_t { x = 1, w, dy };
struct Key {
  Role role;
  const int64_t *seed, *offset;
};

// Where a quantizer writes.
struct Destination {
  Destination(const Context& at, const QuantSpec& stored, int axis, const Extent& e,
              Lifetime lifetime);

  OperandPlan plan;
  Quantized view;
};

// The operands of x along its rows and down its columns, with all that quantize_operands() needs
// to make them. x is one matrix, with `batched` [E, R, C], or in groups.
struct PendingOperands {
  PendingOperands(const Context& at, const Tensor& x, bool batched, const Groups& groups,
                  const OperandRequest& row_request, const OperandRequest& column_request,
                  const Key& key, const Shard& shard = {});
  Quantization quantization() const {
    return {in.view,
            made_row ? &made_row->view : nullptr,
            made_column ? &made_column->view : nullptr,
            row_options,
            column_options,
            row_values};
  }

  // One that is not wanted is left out, and one that outlives the call is in `made_row` or
  // `made_column` alone.
  std::optional<GemmOperand> row, column;
  Input in;
  std::optional<Destination> made_row, made_column;
  QuantizeOptions row_options, column_options;
  Matrix row_values{};  // of Quantization
};
// Makes the operands of one tensor, in one pass where both are quantized, or of two (either may be
// null). Returns what a product launched next may promise.
Previous quantize_operands(const Context& at, const PendingOperands* first,
                           const PendingOperands* second = nullptr, const WordCopy& word = {});

// Allocates one tensor for the operands that outlive the call, and for the offset.
SavedOperands allocate_saved(const Context& at, std::optional<Destination>* first,
                             std::optional<Destination>* second = nullptr, bool offset = false);

}  // namespace blockscale::binding
