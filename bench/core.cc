// Speed of the C++ core on all cores, beside memcpy in the same run. Arrays are far larger than the
// caches; data is random normal BF16. Every case reports bytes_per_second of what it must read and
// write (one read of the input plus the outputs), and memcpy reports the same for its two sides.
#include <benchmark/benchmark.h>

#include <cmath>
#include <cstring>
#include <new>
#include <numbers>
#include <vector>

#include "blockscale/ops.h"

namespace {

using namespace blockscale;

// Arrays start on cache lines, as PyTorch allocates them.
template <class T>
struct LineAllocator {
  using value_type = T;
  LineAllocator() = default;
  template <class U>
  LineAllocator(const LineAllocator<U>&) {}
  T* allocate(size_t n) {
    return static_cast<T*>(::operator new(n * sizeof(T), std::align_val_t(64)));
  }
  void deallocate(T* p, size_t) { ::operator delete(p, std::align_val_t(64)); }
  bool operator==(const LineAllocator&) const = default;
};
template <class T>
using Array = std::vector<T, LineAllocator<T>>;

constexpr int64_t kRows = 8192, kColumns = 8192;

// Box-Muller over Philox: the same numbers on every machine.
Array<uint16_t> random_normal(int64_t count) {
  Array<uint16_t> values(static_cast<size_t>(count));
  default_executor().parallel_for(count / 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto low = static_cast<uint32_t>(i);
      const PhiloxBlock r = philox4x32({{low, 0, 0, 0}}, 1, 2);
      for (int pair = 0; pair < 2; ++pair) {
        const double u = (r.word[2 * pair] + 0.5) * 0x1p-32;
        const double angle = r.word[2 * pair + 1] * (2 * std::numbers::pi * 0x1p-32);
        const double radius = std::sqrt(-2 * std::log(u));
        values[4 * i + 2 * pair] = to_bf16(static_cast<float>(radius * std::cos(angle)));
        values[4 * i + 2 * pair + 1] = to_bf16(static_cast<float>(radius * std::sin(angle)));
      }
    }
  });
  return values;
}

const Array<uint16_t>& input() {
  static const Array<uint16_t> values = random_normal(kRows * kColumns);
  return values;
}

ConstMatrix matrix() {
  return {.data = input().data(),
          .dtype = DType::bf16,
          .rows = kRows,
          .columns = kColumns,
          .row_stride = kColumns};
}

// An operand with its own storage.
struct Operand {
  Operand(const QuantSpec& spec, int axis, StorageLayout layout = {}, int64_t rows = kRows,
          int64_t columns = kColumns) {
    q.spec = spec;
    q.axis = axis;
    q.layout = layout;
    q.rows = rows;
    q.columns = columns;
    const StoredShape s = q.shape();
    codes.resize(static_cast<size_t>(s.code_bytes));
    scales.resize(static_cast<size_t>(s.scale_count * scale_bytes(spec.scale)));
    q.codes = codes.data();
    q.scales = scales.data();
    q.outer = &outer;
  }
  int64_t bytes() const { return static_cast<int64_t>(codes.size() + scales.size()); }

  Array<uint8_t> codes, scales;
  float outer = 0;
  Quantized q;
};

constexpr int64_t kInputBytes = kRows * kColumns * 2;
constexpr float kAmax = 6.0f;

QuantizeOptions options(const QuantSpec& spec) {
  QuantizeOptions o;
  if (spec.outer) o.amax = &kAmax;
  if (spec.stochastic()) o.rng = Rng{1, 2};
  return o;
}

void run_memcpy(benchmark::State& state) {
  const auto bytes = static_cast<int64_t>(input().size() * 2);
  Array<char> target(static_cast<size_t>(bytes));
  const auto* source = reinterpret_cast<const char*>(input().data());
  for (auto _ : state) {
    constexpr int64_t kChunk = 1 << 20;
    default_executor().parallel_for(bytes / kChunk, [&](int64_t begin, int64_t end) {
      std::memcpy(target.data() + begin * kChunk, source + begin * kChunk,
                  static_cast<size_t>((end - begin) * kChunk));
    });
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * bytes * 2);
}

void run_quantize(benchmark::State& state, const char* text, int axis) {
  const QuantSpec spec = parse_spec(text);
  Operand out(spec, axis);
  for (auto _ : state) quantize(matrix(), out.q, options(spec));
  state.SetBytesProcessed(state.iterations() * (kInputBytes + out.bytes()));
}

void run_dual(benchmark::State& state, const char* row_text, const char* column_text) {
  const QuantSpec row = parse_spec(row_text), column = parse_spec(column_text);
  Operand row_out(row, -1), column_out(column, -2);
  for (auto _ : state)
    quantize_dual(matrix(), row_out.q, column_out.q, options(row), options(column));
  state.SetBytesProcessed(state.iterations() *
                          (kInputBytes + row_out.bytes() + column_out.bytes()));
}

void run_dequantize(benchmark::State& state, const char* text, int axis) {
  const QuantSpec spec = parse_spec(text);
  Operand operand(spec, axis);
  quantize(matrix(), operand.q, options(spec));
  Array<uint16_t> values(input().size());
  const Matrix out{values.data(), DType::bf16, kRows, kColumns, kColumns};
  for (auto _ : state) dequantize(as_const(operand.q), out);
  state.SetBytesProcessed(state.iterations() * (kInputBytes + operand.bytes()));
}

void run_amax(benchmark::State& state) {
  float result = 0;
  for (auto _ : state) {
    amax(matrix(), kNvfp4, -1, &result);
    benchmark::DoNotOptimize(result);
  }
  state.SetBytesProcessed(state.iterations() * kInputBytes);
}

void run_gemm(benchmark::State& state, const char* a_text, const char* b_text, int64_t n) {
  ConstMatrix x = matrix();
  x.rows = x.columns = n;
  Operand a(parse_spec(a_text), -1, {}, n, n), b(parse_spec(b_text), -1, {}, n, n);
  quantize(x, a.q, options(a.q.spec));
  quantize(x, b.q, options(b.q.spec));
  Array<float> d(static_cast<size_t>(n * n));
  const Matrix out{d.data(), DType::f32, n, n, n};
  for (auto _ : state) gemm(as_const(a.q), as_const(b.q), out);
  const auto flops = 2.0 * static_cast<double>(n) * static_cast<double>(n) * static_cast<double>(n);
  state.counters["flops"] = benchmark::Counter(flops * static_cast<double>(state.iterations()),
                                               benchmark::Counter::kIsRate);
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(), body)->UseRealTime()->Unit(benchmark::kMillisecond);
}

void add_all() {
  add("memcpy", run_memcpy);
  const char* plain[] = {
      "fp8_1x128", "fp8_128x128",        "mxfp8", "mxfp8[block=32x32]", "mxfp6",
      "mxfp4",     "mxfp4[block=32x32]", "nvfp4", "nvfp4[block=16x16]", "amdfp4"};
  const char* rotated[] = {"nvfp4[rounding=stochastic]", "nvfp4[hadamard=16]",
                           "nvfp4[rounding=stochastic,hadamard=16]"};
  for (int axis : {-1, -2}) {
    const std::string suffix = "/axis:" + std::to_string(axis);
    for (const char* spec : plain)
      add("quantize/" + std::string(spec) + suffix,
          [=](benchmark::State& s) { run_quantize(s, spec, axis); });
    for (const char* spec : rotated)
      add("quantize/" + std::string(spec) + suffix,
          [=](benchmark::State& s) { run_quantize(s, spec, axis); });
    for (const char* spec : {"fp8_1x128", "mxfp8", "mxfp4", "nvfp4"})
      add("dequantize/" + std::string(spec) + suffix,
          [=](benchmark::State& s) { run_dequantize(s, spec, axis); });
  }
  const char* pairs[][2] = {{"fp8_1x128", "fp8_1x128"},
                            {"fp8_128x128", "fp8_128x128"},
                            {"mxfp8", "mxfp8"},
                            {"nvfp4", "nvfp4"},
                            {"nvfp4[block=16x16]", "nvfp4[block=16x16]"},
                            {rotated[0], rotated[2]}};
  for (const auto& pair : pairs)
    add("quantize_dual/" + std::string(pair[0]) + "+" + pair[1],
        [=](benchmark::State& s) { run_dual(s, pair[0], pair[1]); });
  add("amax", run_amax);
  const char* operands[][2] = {{"fp8_1x128", "fp8_128x128"},
                               {"fp8_1x128", "fp8_1x128"},
                               {"mxfp8", "mxfp8"},
                               {"mxfp4", "mxfp4[block=32x32]"},
                               {"nvfp4", "nvfp4[block=16x16]"},
                               {"amdfp4", "amdfp4[block=16x16]"}};
  for (const auto& pair : operands)
    add("gemm/2048/" + std::string(pair[0]) + "*" + pair[1],
        [=](benchmark::State& s) { run_gemm(s, pair[0], pair[1], 2048); });
}

}  // namespace

int main(int argc, char** argv) {
  add_all();
  benchmark::AddCustomContext("instruction_set", instruction_set());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
