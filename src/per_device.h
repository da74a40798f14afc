// What is found of a device once, because asking again would cost every call.
#pragma once

#include <atomic>
#include <utility>

namespace blockscale {

// A number of each device; threads may find it at once, as all find the same.
class PerDevice {
 public:
  // What find() gives; 0, such as after a failure, is asked for again.
  template <class Find>
  int get(int device, Find&& find) {
    const bool kept = device >= 0 && device < kDevices;
    if (const int known = kept ? known_[device].load() : 0; known != 0) return known;
    const int found = std::forward<Find>(find)();
    if (kept) known_[device] = found;
    return found;
  }

 private:
  static constexpr int kDevices = 64;  // beyond, each call asks
  std::atomic<int> known_[kDevices]{};
};

}  // namespace blockscale
