// EXPECT_ERROR(statement, "fragment", ...): the statement throws blockscale::Error, in the one form
// "operation: argument = got; need ...", with every fragment in its message.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "blockscale/status.h"

namespace blockscale::testing {

template <class Body>
::testing::AssertionResult throws_error(const Body& body,
                                        std::initializer_list<std::string> parts) {
  std::string message;
  try {
    body();
    return ::testing::AssertionFailure() << "nothing was thrown";
  } catch (const Error& error) {
    message = error.what();
  }
  std::vector<std::string> wanted = {": ", " = ", "; need "};
  wanted.insert(wanted.end(), parts);
  for (const std::string& part : wanted)
    if (message.find(part) == std::string::npos)
      return ::testing::AssertionFailure() << "no \"" << part << "\" in: " << message;
  if (message.ends_with("; ")) return ::testing::AssertionFailure() << "cut short: " << message;
  return ::testing::AssertionSuccess();
}

}  // namespace blockscale::testing

#define EXPECT_ERROR(statement, ...) \
  EXPECT_TRUE(::blockscale::testing::throws_error([&] { (void)(statement); }, {__VA_ARGS__}))
