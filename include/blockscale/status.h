// The one error type. Every message has one form: operation: argument = got; need; remedy.
#pragma once

#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

namespace blockscale {

// A request that cannot be carried out. Thrown at the API boundary, before anything is written; but
// where a GPU refuses a launch, earlier launches of the call may have written.
class Error : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// fail("quantize", "axis", 3, "-1 or -2", "quantize along a row or a column").
template <class Got>
[[noreturn]] void fail(const std::string& operation, const std::string& argument, const Got& got,
                       const std::string& need, const std::string& remedy = "") {
  std::ostringstream text;
  text.imbue(std::locale::classic());  // the program's own may group digits
  text << operation << ": " << argument << " = " << got << "; need " << need;
  if (!remedy.empty()) text << "; " << remedy;
  throw Error(text.str());
}

template <class Got>
void require(bool ok, const char* operation, const char* argument, const Got& got, const char* need,
             const char* remedy = "") {
  if (!ok) fail(operation, argument, got, need, remedy);
}

}  // namespace blockscale
