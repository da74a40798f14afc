// The names of the instruction sets.
#include "hwy/targets.h"

#include "blockscale/ops.h"

namespace blockscale {

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  const int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  for (int64_t rest = supported; rest; rest &= rest - 1)
    names.push_back(hwy::TargetName(rest & -rest));
  return names;
}

// Lower bits are better targets; dispatch picks the best.
std::string instruction_set() { return instruction_sets().front(); }

}  // namespace blockscale
