// Quantizes a Gaussian matrix, decodes it, and prints how much of it survived:
//     blockscale_example [SPEC]        SPEC is e.g. mxfp8 or nvfp4[block=16x16]; nvfp4 by default
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "blockscale/ops.h"

namespace {

constexpr int64_t kRows = 300, kColumns = 1000;  // any shape: no extent must divide

// The buffers of a quantized operand and the view that the operators take.
struct Operand {
  std::vector<uint8_t> codes;
  std::vector<float> scales;  // floats, for their alignment: some scale formats are FP32
  float outer = 1.0f;
  blockscale::Quantized view;

  Operand(const blockscale::QuantSpec& spec, int axis, int64_t rows, int64_t columns) {
    view.spec = spec;
    view.axis = axis;
    view.rows = rows;
    view.columns = columns;
    const blockscale::StoredShape shape = view.shape();
    const int64_t scale_bytes = shape.scale_count * blockscale::scale_bytes(spec.scale);
    codes.resize(static_cast<size_t>(shape.code_bytes));
    scales.resize(static_cast<size_t>((scale_bytes + 3) / 4));
    view.codes = codes.data();
    view.scales = reinterpret_cast<uint8_t*>(scales.data());
    view.outer = spec.outer ? &outer : nullptr;
  }
  Operand(const Operand&) = delete;  // `view` points into this object
  Operand& operator=(const Operand&) = delete;
};

std::vector<float> gaussian(int64_t count) {
  std::mt19937 generator(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(generator);
  return values;
}

// A dense row-major view; Pointer is const void* (read) or void* (written).
template <class Pointer>
blockscale::BasicMatrix<Pointer> matrix(Pointer data) {
  return {.data = data, .rows = kRows, .columns = kColumns, .row_stride = kColumns};
}

// Signal to quantization noise, in decibels.
double sqnr(const std::vector<float>& x, const std::vector<float>& decoded) {
  double signal = 0, noise = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double error = double{decoded[i]} - x[i];
    signal += double{x[i]} * x[i];
    noise += error * error;
  }
  return 10 * std::log10(signal / noise);
}

void run(const char* text) {
  const blockscale::QuantSpec spec = blockscale::parse_spec(text);
  if (spec.hadamard.dim != 0) {  // dequantize does not undo the transform
    throw std::invalid_argument("spec = " + std::string(text) +
                                "; need a spec without a Hadamard transform, whose codes stand for "
                                "the transformed matrix; drop hadamard=");
  }
  const std::vector<float> x = gaussian(kRows * kColumns);
  std::vector<float> decoded(x.size());

  Operand q(spec, /*axis=*/-1, kRows, kColumns);
  blockscale::quantize(matrix<const void*>(x.data()), q.view);
  blockscale::dequantize(blockscale::as_const(q.view), matrix<void*>(decoded.data()));

  const auto shape = q.view.shape();
  const double bytes = static_cast<double>(shape.code_bytes) +
                       static_cast<double>(shape.scale_count * blockscale::scale_bytes(spec.scale));
  std::printf("%s: %.2f bits per value, SQNR %.2f dB\n", blockscale::to_string(spec).c_str(),
              8 * bytes / static_cast<double>(x.size()), sqnr(x, decoded));
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "nvfp4");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "blockscale_example: %s\n", error.what());
    return 1;
  }
}
