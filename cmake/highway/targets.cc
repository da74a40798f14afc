// The part of Highway that lives in its library: which instruction sets this processor has, and the
// cell that remembers the answer for HWY_DYNAMIC_DISPATCH. Distributions ship that library only as
// a shared object; with these five functions the headers are enough, so the wheel and the installed
// static library depend on nothing. The build renames Highway's namespace (`hwy=blockscale_hwy`):
// a program that links its own Highway shares no symbol with ours.
#include <hwy/targets.h>

#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

namespace hwy {
namespace {

// What the compiler may emit for each target beyond the baseline that the build sets: the feature
// lists of hwy/ops/set_macros-inl.h.
// __builtin_cpu_supports also asks whether the operating system saves the wide registers.
int64_t detect_targets() {
  int64_t targets = HWY_ENABLED_BASELINE;
#if HWY_ARCH_X86
  __builtin_cpu_init();
  if (!(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi") &&
        __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("lzcnt")))
    return targets;
  targets |= HWY_AVX2;
  if (!(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")))
    return targets;
  targets |= HWY_AVX3;
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bitalg") &&
      __builtin_cpu_supports("avx512vpopcntdq") && __builtin_cpu_supports("vpclmulqdq") &&
      __builtin_cpu_supports("vaes") && __builtin_cpu_supports("gfni"))
    targets |= HWY_AVX3_DL;
#endif
  return targets;
}

std::atomic<int64_t> enabled_targets{~int64_t{0}};
std::atomic<int64_t> targets_for_test{0};

}  // namespace

int64_t SupportedTargets() {
  static const int64_t detected = detect_targets();
  const int64_t mock = targets_for_test.load();
  const int64_t targets = (mock != 0 ? mock : detected) & enabled_targets.load();
  return targets != 0 ? targets : HWY_STATIC_TARGET;  // something must always be callable
}

// Each table of HWY_EXPORT asks again at its next call.
void DisableTargets(int64_t disabled_targets) {
  enabled_targets.store(~disabled_targets);
  GetChosenTarget().DeInit();
}

void SetSupportedTargetsForTest(int64_t targets) {
  targets_for_test.store(targets);
  GetChosenTarget().DeInit();
}

ChosenTarget& GetChosenTarget() {
  static ChosenTarget chosen;
  return chosen;
}

void Abort(const char* file, int line, const char* format, ...) {
  std::fprintf(stderr, "%s:%d: ", file, line);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
  std::abort();
}

}  // namespace hwy
