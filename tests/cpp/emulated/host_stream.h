// A stream whose workspace is guarded host memory.
#pragma once

#include <list>

#include "../buffers.h"

namespace blockscale::testing {

class HostStream final : public Stream {
 public:
  void* handle() const override { return nullptr; }
  void* workspace(int64_t bytes) const override { return pieces_.emplace_back(bytes).data(); }

 private:
  mutable std::list<Guarded> pieces_;
};

}  // namespace blockscale::testing
