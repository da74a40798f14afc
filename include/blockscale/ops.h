// The operators: on the CPU with an executor, on a GPU with a stream. They check their arguments
// first: what they refuse is an Error before anything is written. (On a GPU it is also an Error if
// a launch fails; earlier ones may have written by then.) Outputs must overlap neither inputs nor
// each other. `reference::` (below) defines, one scalar at a time, the result that every backend
// gives; of transpose, which it does not have, the definition is quantize along the other axis.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "blockscale/philox.h"
#include "blockscale/status.h"
#include "blockscale/tensor.h"

namespace blockscale {

// Runs body(begin, end) over disjoint ranges that cover [0, count), in any order, on any threads
// with 256 KB of stack, and returns when all are done. If bodies throw, it rethrows at least one of
// their exceptions. Prefer few long ranges to many: each takes its own memory.
class Executor {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;
  virtual ~Executor() = default;
  virtual void parallel_for(int64_t count, const Body& body) const = 0;
};
const Executor& serial_executor();
// One thread per logical processor of the machine, started on first use. One call uses them at a
// time; nested and concurrent calls, and those in the child of a fork, run in the calling thread.
const Executor& default_executor();

// Where the operators below run on a GPU: the overloads that take a Stream read and write device
// memory, launch their kernels in stream order and return without waiting. Every pointer (data,
// amax, keys, outputs) refers to memory of the stream's device; operands' codes begin at multiples
// of 16 bytes and FP32 scales at multiples of 4. What kernels can count has limits there:
//   a matrix           extents below 2^31; fewer than 2^30 tiles of 128 x 128 in a batch
//   an operand         extents below 2^31 in whole blocks and transforms, with the padding of its
//                      layouts; up to 2^32 scales of a matrix, padding included; in mfma_16x16,
//                      lines of less than 2^27 bytes; to dequantize, fewer than 2^36 elements of a
//                      matrix
//   in groups          fewer than 2^22 tiles of 128 x 128, where each group counts as one more row
//                      of tiles
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void* handle() const = 0;  // cudaStream_t of the current device; null: its default stream
  // Device memory that lives until the work launched so far is done, from a multiple of 16 bytes
  // on. Its size depends on shapes, and on whether the scales of a gemm lie at multiples of 16
  // bytes. Quantizers request one FP32 per matrix for each amax not given (for small inputs, one
  // per 128 x 128 tile); a BF16 copy of x for a Hadamard transform wider than 16, and another for
  // its amax if not given, as amax itself does; and, where both directions have one-byte elements,
  // `linear` scales and no square blocks, a copy of the scales of both. With groups, amax,
  // dequantize, relayout and quantizers with no compiled kernel request some bytes for each group
  // and each 128 rows of x. Without a compiled kernel, quantizers also request space for what they
  // widen. gemm requests it for scales it copies, for MXFP4 as FP8 (below), and for MXFP4 operands
  // that are not linear.
  virtual void* workspace(int64_t bytes) const = 0;
};

struct QuantizeOptions {
  const float* amax = nullptr;  // per matrix of the batch, or per group; only for specs with an
                                // outer scale; computed when null
  std::optional<Rng> rng;       // required by stochastic specs
  // On a GPU, instead of `rng`: seed and offset in device memory, read when the kernel runs.
  const int64_t* device_seed = nullptr;
  const int64_t* device_offset = nullptr;
  uint64_t device_seed_step = 0;  // added to *device_seed
  // Of x in the unsharded tensor, at least 0: whole blocks and transforms along the contraction
  // axis, and whole blocks across it if they are square. With stochastic rounding, all coordinates
  // there are below 2^32, those of padding included; the lines of a batch are counted on from one
  // matrix to the next.
  int64_t origin_row = 0;
  int64_t origin_column = 0;
  // On a GPU: x is quantized to this spec in MXFP4, and then widened to that of the output, E5M2 in
  // 1x128 blocks with mn_major scales, as gemm widens the left one of two operands (below). The
  // output serves gemm alone: with groups of rows its scales lie where its codes do.
  std::optional<QuantSpec> widened;
};

// x [rows, columns] -> out. Reads x once, and once more when an outer scale's amax is not given.
//
// With out.groups, every group is quantized as if alone and stored at the group's place. Its row
// origin is origin_row + its first row (axis -1), or origin_row + the start of its codes in whole
// blocks (axis -2: groups.h). Codes and scales that belong to no group hold padding. On a GPU,
// offsets are read when the kernel runs; if one is smaller than its predecessor or past the end of
// x, every scale (and outer scale) of the result is NaN and every code 0.
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options = {},
              const Executor& executor = default_executor());
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options,
              const Stream& stream);

// Rows and columns of x in one pass: row_out has axis -1 and column_out axis -2. Specs may differ;
// groups are the same, with the same offsets in memory.
void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options = {},
                   const QuantizeOptions& column_options = {},
                   const Executor& executor = default_executor());
void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                   const Stream& stream);

// One input and the operands made from it: along its rows, down its columns, or both.
// `row_values` receives the row operand's values, decoded as if it had no outer scale. Nothing is
// written there if its data is null; otherwise there is a row operand, without groups or a
// transform, x is one matrix, and row_values is BF16 with x's extents, contiguous columns and rows
// at multiples of 16 bytes that do not overlap.
struct Quantization {
  ConstMatrix x;
  const Quantized* row = nullptr;
  const Quantized* column = nullptr;
  QuantizeOptions row_options{}, column_options{};
  Matrix row_values{};
};
// A word of device memory to copy; nothing is copied when `to` is null.
struct WordCopy {
  int64_t* to = nullptr;
  const int64_t* from = nullptr;
};
// Quantizes two inputs, such as those of a linear layer, and copies a word, with fewer GPU launches
// than doing so one after the other.
void quantize_two(const Quantization& first, const Quantization& second, const Stream& stream,
                  const WordCopy& word = {});

// max |x| after the spec's transform along `axis`, one FP32 per matrix of the batch, or per group:
// NaN when any value is NaN, else Inf when any is infinite, 0 for an empty matrix. On a GPU,
// offsets that decrease or pass the end of x make every result NaN.
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out,
          const Executor& executor = default_executor(), const Groups& groups = {});
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Stream& stream,
          const Groups& groups = {});

// x^ = fl(fl(outer * scale) * code), then rounded (RN) to x.dtype. A Hadamard transform is not
// undone: x^ is the transformed operand, which is extended like the codes, cut to x's extents. Rows
// in no group are 0; on a GPU, offsets that decrease or pass the end make all of x^ NaN.
void dequantize(const ConstQuantized& q, const Matrix& x,
                const Executor& executor = default_executor());
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);

// Copies the operand into another storage layout. Both have the same groups: the same offsets in
// memory.
void relayout(const ConstQuantized& from, const Quantized& to,
              const Executor& executor = default_executor());
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// Makes the operand along the other axis of the same matrices. Blocks must be square, so that both
// axes share one scale: with rounding to nearest, the result is what quantize would make of x along
// that axis, without needing x. (Stochastic codes stay those drawn for from's axis.) Allows no
// transform, which mixes along its own axis only, and no groups; codes are linear in both operands.
void transpose(const ConstQuantized& from, const Quantized& to,
               const Executor& executor = default_executor());
void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// How early a product may begin on a GPU. Every value but `any` is a promise about its inputs.
// `last` is the most recent kernel that this library launched from the same thread on the stream,
// and is not a product with the same promise. (Calls on empty operands launch no kernel; if there
// is no `last`, only `any` is correct.)
enum class Previous : int {
  any,       // waits for everything launched before
  operands,  // offsets were written before `last` was launched
  nothing,   // so were A and B (codes, scales, offsets)
};

// D = alpha * (A B^T) + bias [+ D]. A is [M, K] and B is [N, K], up to their axes: each operand's
// contraction axis is the one it was quantized along, and its lines are the rows of A or B. Both
// have the same block length and the same Hadamard transform. D is FP32 or BF16.
//
// With groups it is one product per group:
//   along the rows         a.groups, axis -1: A is [M, K], its rows divided into groups; b is a
//                          batch of matrices [N, K], one per group; D is [M, N]. Rows of D that
//                          belong to no group become 0.
//   along the contraction  a.groups and b.groups, which are the same, axis -2: A is [K, M] and B is
//                          [K, N] as they were quantized, K divided into groups; D is a batch of
//                          [M, N], one per group. The sum of an empty group is 0.
// With accumulate, elements that have no sum keep their value. On a GPU, offsets are read when the
// kernel runs; if they decrease or pass the end, all of D is NaN.
//
// On a GPU: FP8 with FP32 scales and MXFP4, on compute capability 9.0. FP8 codes are linear; the
// elements of a row of D are contiguous, and the matrices of a batch of D lie one below the other;
// there are at most 1024 groups, and rows in groups have blocks of one row. FP8 scales are best
// mn_major at a multiple of 16 bytes, with A in 1x128 blocks: others are copied into that form in
// the workspace (4 bytes per scale). Two MXFP4 operands become FP8 there (a byte per code).
// This is exact where the scales of a line of B, and of 128 codes of a line of A, are within 2^28
// of each other; else a value is wrong by at most 2^-31 of the largest among those. B's scales are
// applied last, and sums overflow where the sum of |A| along a line exceeds 7e33.
// Sums run in the tensor cores' precision within 128 of K, and in FP32 across them.
struct GemmOptions {
  float alpha = 1.0f;
  const float* device_alpha = nullptr;  // on a GPU: a further factor, read when the kernel runs
  const void* bias = nullptr;           // N values, added to every row; with groups, N per group
  DType bias_dtype = DType::f32;        // f32 if the bias is in host memory
  bool accumulate = false;              // add to D (FP32 only) instead of overwriting it
  Previous previous = Previous::any;    // on a GPU
};
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options = {}, const Executor& executor = default_executor());
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);
// What gemm requires of operands of this spec on a device ("cpu", "cuda", "cuda:1"), in words;
// empty when it can multiply them. Only the call itself checks which GPU is present.
std::string gemm_needs(const QuantSpec& spec, std::string_view device);

// Checks offsets in host memory as the operators do, for `rows` rows of x; `op` names the operator
// in the error. Operators do not inspect offsets in device memory (see quantize): call this on a
// copy of them to debug.
void check_offsets(const char* op, const Groups& groups, int64_t rows);

// Why operands of this spec and layout cannot be used on a device, in the words of an operator's
// error; empty when they can. It checks the spec, the layout and whether the device has a backend,
// and no operator: of products, gemm_needs() says more.
std::string explain(std::string_view spec, std::string_view layout, std::string_view device);

// The backends of this build.
struct Backend {
  std::string name;
  bool available;
  std::string reason;  // why it is not available
};
std::vector<Backend> backends();
// The instruction set that the CPU backend uses, and all that both this build and the machine
// support.
std::string instruction_set();
std::vector<std::string> instruction_sets();

// Like the operators above, for arguments that those would accept: nothing is checked here, and the
// calling thread's rounding mode and subnormal handling apply as they are.
namespace reference {
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options);
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out,
          const Groups& groups = {});
void dequantize(const ConstQuantized& q, const Matrix& x);
void relayout(const ConstQuantized& from, const Quantized& to);
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options);
}  // namespace reference

}  // namespace blockscale
