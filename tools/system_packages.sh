#!/usr/bin/env bash
# Finds out which system packages the build lacks, by looking for what they provide; with the argument
# `hip` or `arm`, those of `make hip` or `make arm` instead. As root with apt-get they are installed;
# otherwise the command that installs them is printed, and this fails.
set -euo pipefail

python=${PYTHON:-python3}
missing=()
need() { # need PACKAGE TEST...: PACKAGE is missing when TEST fails
  local package=$1
  shift
  "$@" >/dev/null 2>&1 || missing+=("$package")
}
header() { echo "#include <$1>" | g++ -std=c++20 -E -x c++ - >/dev/null; }

if [ "${1:-}" = hip ]; then
  need hipcc command -v hipcc
  need clang-19 command -v clang++-19
elif [ "${1:-}" = arm ]; then
  need g++-aarch64-linux-gnu command -v aarch64-linux-gnu-g++
  need qemu-user-static command -v qemu-aarch64-static
  need googletest test -f /usr/src/googletest/googletest/CMakeLists.txt
else
  need git command -v git
  need make command -v make
  need g++ command -v g++
  need cmake command -v cmake
  need ninja-build command -v ninja
  need python3-venv "$python" -c "import ensurepip, venv"
  need libhwy-dev header hwy/highway.h
  need libgtest-dev header gtest/gtest.h
  need libbenchmark-dev header benchmark/benchmark.h
fi

if [ ${#missing[@]} -eq 0 ]; then exit 0; fi
if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  exec apt-get install -y -qq --no-install-recommends "${missing[@]}"
fi
cat >&2 <<EOF
make ${1:-setup}: system packages are missing: ${missing[*]}
On Debian or Ubuntu:

    sudo apt-get update && sudo apt-get install -y ${missing[*]}

On another system, install what provides the same, then run the command again.
EOF
exit 1
