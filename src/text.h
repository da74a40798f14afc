// Small text helpers for names in messages.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace blockscale {

std::string join(const std::vector<std::string>& parts, const char* separator);
// The pieces between separators, empty ones included: n separators give n + 1 pieces.
std::vector<std::string_view> split(std::string_view text, char separator);
std::string quoted(std::string_view text);
// A remedy that suggests the candidate at the smallest edit distance, ignoring case; empty if that
// distance is more than half the longer word's length.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace blockscale
