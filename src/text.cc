#include "text.h"

#include <algorithm>
#include <numeric>

namespace blockscale {

std::string join(const std::vector<std::string>& parts, const char* separator) {
  std::string text;
  for (const std::string& part : parts) text += (text.empty() ? "" : separator) + part;
  return text;
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end; (end = text.find(separator)) != std::string_view::npos;) {
    parts.push_back(text.substr(0, end));
    text.remove_prefix(end + 1);
  }
  parts.push_back(text);
  return parts;
}

std::string quoted(std::string_view text) { return "'" + std::string(text) + "'"; }

namespace {

char lower(char c) { return 'A' <= c && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0]++;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t above = row[j + 1];
      row[j + 1] = std::min({above + 1, row[j] + 1, diagonal + (lower(a[i]) != lower(b[j]))});
      diagonal = above;
    }
  }
  return row.back();
}

}  // namespace

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  // A candidate that starts with the name is nearer than any other.
  const auto distance = [&](const std::string& candidate) {
    const bool begins = !name.empty() && edit_distance(name, candidate.substr(0, name.size())) == 0;
    return begins ? 0 : edit_distance(name, candidate);
  };
  const std::string& nearest =
      *std::min_element(candidates.begin(), candidates.end(),
                        [&](const auto& a, const auto& b) { return distance(a) < distance(b); });
  if (2 * distance(nearest) > std::max(name.size(), nearest.size())) return "";
  return "did you mean " + quoted(nearest) + "?";
}

}  // namespace blockscale
