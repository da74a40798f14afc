// Device properties that are queried once, because a query would cost every call.
#pragma once

#include <atomic>
#include <utility>

namespace blockscale {

// One number per device. Threads may query it concurrently, as all get the same answer.
class PerDevice {
 public:
  // The result of find(), kept unless it is 0, such as after a failure: then the next call asks
  // again.
  template <class Find>
  int get(int device, Find&& find) {
    const bool kept = device >= 0 && device < kDevices;
    if (const int known = kept ? known_[device].load() : 0; known != 0) return known;
    const int found = std::forward<Find>(find)();
    if (kept) known_[device] = found;
    return found;
  }

 private:
  static constexpr int kDevices = 64;  // for devices beyond these, each call asks
  std::atomic<int> known_[kDevices]{};
};

}  // namespace blockscale
