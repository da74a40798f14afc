// The operators: on the CPU with an executor, on a GPU with a stream. Arguments are checked here,
// and refused by an Error before anything is written. Outputs overlap neither inputs nor each
// other. `reference::` (below) is the definition, one scalar at a time, of what every backend
// gives.
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
// with 256 KB of stack, and returns when all are done; what a body throws, one of them at least, it
// throws. Few long ranges are better than many: each takes memory of its own.
class Executor {
 public:
  using Body = std::function<void(int64_t begin, int64_t end)>;
  virtual ~Executor() = default;
  virtual void parallel_for(int64_t count, const Body& body) const = 0;
};
const Executor& serial_executor();
// As many threads as the machine has cores, started on first use. One call has them at a time; what
// is called within it, or beside it, or in the child of a fork, runs in the calling thread.
const Executor& default_executor();

// Where the operators below run on a GPU: the overloads that take a Stream read and write device
// memory, launch their kernels in stream order and return without waiting. Everything a pointer
// leads to (data, amax, keys, outputs) is memory of the stream's device. There extents are below
// 2^31, and the codes of operands begin at multiples of 16 bytes.
class Stream {
 public:
  virtual ~Stream() = default;
  virtual void* handle() const = 0;  // cudaStream_t of the current device; null: its default stream
  // Device memory that lives until the work launched so far is done. Its size depends on shapes,
  // and on whether scales of a gemm lie at multiples of 16 bytes. Quantizers ask for an FP32 a
  // matrix for each amax that is not given, of small inputs one a tile of 128 x 128; for a BF16
  // copy of x for a Hadamard transform wider than 16; and for a copy of the scales of both
  // directions of elements of a byte, `linear` and not square. In groups amax, dequantize, relayout
  // and quantizers that no kernel is compiled for ask for some bytes for each group and each 128
  // rows of x; gemm for the scales that it copies and for MXFP4 as FP8 (below).
  virtual void* workspace(int64_t bytes) const = 0;
};

struct QuantizeOptions {
  const float* amax = nullptr;  // per matrix of the batch, or per group; only for specs with an
                                // outer scale; computed when null
  std::optional<Rng> rng;       // needed by stochastic specs
  // On a GPU instead of `rng`: seed and offset in device memory, read when the kernel runs.
  const int64_t* device_seed = nullptr;
  const int64_t* device_offset = nullptr;
  uint64_t device_seed_step = 0;  // added to *device_seed
  int64_t origin_row = 0;     // of x in the unsharded tensor; whole blocks along the contraction
  int64_t origin_column = 0;  // axis (and across it for square blocks)
};

// x [rows, columns] -> out. Reads x once, and once more when an outer scale's amax is not given.
//
// With out.groups, every group becomes what it would become alone, with
// origin_row + its first row as its origin (axis -1) or origin_row + the start of its codes in
// whole blocks (axis -2: groups.h), at the group's place. Codes and scales that belong to no group
// are padding. On a GPU offsets are read when the kernel runs; where one is smaller than the one
// before or past the end of x, every scale (and outer scale) of the result is NaN and every code 0.
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options = {},
              const Executor& executor = default_executor());
void quantize(const ConstMatrix& x, const Quantized& out, const QuantizeOptions& options,
              const Stream& stream);

// Rows (axis -1) and columns (axis -2) of x in one pass; the specs may differ.
void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options = {},
                   const QuantizeOptions& column_options = {},
                   const Executor& executor = default_executor());
void quantize_dual(const ConstMatrix& x, const Quantized& row_out, const Quantized& column_out,
                   const QuantizeOptions& row_options, const QuantizeOptions& column_options,
                   const Stream& stream);

// One input, and what is made of it: along its rows, down its columns, or both. And where the row
// operand's values go, as those of one without an outer scale: BF16 with x's extents, rows at
// multiples of 16 bytes; none without data.
struct Quantization {
  ConstMatrix x;
  const Quantized* row = nullptr;
  const Quantized* column = nullptr;
  QuantizeOptions row_options{}, column_options{};
  Matrix row_values{};
};
// A word of device memory that is copied; none without `to`.
struct WordCopy {
  int64_t* to = nullptr;
  const int64_t* from = nullptr;
};
// Two inputs, as a linear layer has, and a word: on a GPU with fewer launches than one after the
// other.
void quantize_two(const Quantization& first, const Quantization& second, const Stream& stream,
                  const WordCopy& word = {});

// max |x| after the spec's transform along `axis`, one FP32 per matrix of the batch, or per group:
// NaN when any value is NaN, else Inf when any is infinite, 0 for an empty matrix. On a GPU offsets
// that decrease or pass the end of x make all of them NaN.
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out,
          const Executor& executor = default_executor(), const Groups& groups = {});
void amax(const ConstMatrix& x, const QuantSpec& spec, int axis, float* out, const Stream& stream,
          const Groups& groups = {});

// x^ = fl(fl(outer * scale) * code), then rounded (RN) to x.dtype. A Hadamard transform is not
// undone: x^ is the transformed operand, extended like the codes, cut to x's extents. Rows that
// belong to no group are 0; on a GPU, offsets that decrease or pass the end make all of x^ NaN.
void dequantize(const ConstQuantized& q, const Matrix& x,
                const Executor& executor = default_executor());
void dequantize(const ConstQuantized& q, const Matrix& x, const Stream& stream);

// The same operand in another storage layout. Groups must be the same.
void relayout(const ConstQuantized& from, const Quantized& to,
              const Executor& executor = default_executor());
void relayout(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// The operand along the other axis of the same matrices, whose blocks are square, so that they have
// one scale along both: what quantize would make of x there, without x, where it rounds to nearest.
// (Stochastic codes stay those of from's axis.) No transform, which mixes along its own axis alone;
// no groups; linear codes in both.
void transpose(const ConstQuantized& from, const Quantized& to,
               const Executor& executor = default_executor());
void transpose(const ConstQuantized& from, const Quantized& to, const Stream& stream);

// How early a product begins on a GPU: other than `any` is a promise about what it reads. `last` is
// the kernel of this library that the same thread has launched last on the stream, and is no
// product of the same promise. (Calls of empty operands launch none; without one only `any` is
// right.)
enum class Previous : int {
  any,       // waits for all that was launched before
  operands,  // offsets were written before `last` was launched
  nothing,   // so were A and B (codes, scales, offsets)
};

// D = alpha * (A B^T) + bias [+ D]. A is [M, K], B is [N, K] up to their axes: each operand's
// contraction axis is the one it was quantized along, its lines are the rows of A or B. Both have
// blocks of one length and the same Hadamard transform. D is FP32 or BF16.
//
// Groups make it one product a group:
//   along the rows         a.groups, axis -1: A [M, K], its rows by group; b a batch of matrices
//                          [N, K], one a group; D [M, N]. Rows of D that belong to no group become
//                          0.
//   along the contraction  a.groups and b.groups, the same, axis -2: A [K, M] and B [K, N] as they
//                          were quantized, K by group; D a batch of one [M, N] a group. Where a
//                          group is empty its sum is 0.
// With accumulate, what has no sum stays as it is. On a GPU offsets are read when the kernel runs;
// where they decrease or pass the end, all of D is NaN.
//
// On a GPU: FP8 with FP32 scales and MXFP4, on compute capability 9.0. Codes of FP8 are linear; the
// elements of a row of D lie beside each other, and a batch of D is one matrix below the other;
// there are at most 1024 groups, and rows in groups have blocks of one row. Scales of FP8 are best
// mn_major at a multiple of 16 bytes, and A in 1x128 blocks: others are copied into that form, in
// the workspace (4 bytes a scale). Both operands in MXFP4 become FP8 there (a byte a code), exactly
// where the scales of a line of B, and of 128 codes of a line of A, are within 2^28 of each other;
// else a value is wrong by at most 2^-31 of the largest among those; B's scales come last, and sums
// overflow where those of |A| along a line pass 7e33.
// Sums run within 128 of K in the tensor cores' precision, across them in FP32.
struct GemmOptions {
  float alpha = 1.0f;
  const float* device_alpha = nullptr;  // on a GPU: one more factor, read when the kernel runs
  const void* bias = nullptr;           // N values, added to every row; with groups N for each
  DType bias_dtype = DType::f32;        // f32 where the bias is in host memory
  bool accumulate = false;              // add to D (FP32 only) instead of overwriting it
  Previous previous = Previous::any;    // on a GPU
};
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options = {}, const Executor& executor = default_executor());
void gemm(const ConstQuantized& a, const ConstQuantized& b, const Matrix& d,
          const GemmOptions& options, const Stream& stream);
// What gemm needs of operands of this spec on a kind of device ("cpu", "cuda"), in words; empty
// when it multiplies them. Which GPU there is, only the call itself asks.
std::string gemm_needs(const QuantSpec& spec, std::string_view device);

// What the operators check of offsets in host memory, for `rows` rows of x; `op` names the operator
// in the error. Offsets in device memory are not looked at (see quantize): this is for debugging
// with a copy of them.
void check_offsets(const char* op, const Groups& groups, int64_t rows);

// Why an operator cannot run, in the words of its error; empty when it can.
std::string explain(std::string_view spec, std::string_view layout, std::string_view device);

// Backends of this build.
struct Backend {
  std::string name;
  bool available;
  std::string reason;  // why it is not available
};
std::vector<Backend> backends();
// The instruction set in use by the CPU backend, and all this build holds that the machine has.
std::string instruction_set();
std::vector<std::string> instruction_sets();

// As the operators above, of arguments that they would take: nothing is checked here, and the
// calling thread's rounding and subnormals are what they are.
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
