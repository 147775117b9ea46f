#!/usr/bin/env bash
# Builds the CPU kernels, octavo/_cpu, in place: scripts/build_cpu.sh [cmake options]
# For the best instruction sets of this processor, of floats and of integers, and for generic, or with OCTAVO_ALL_ISAS=1
# for all that there are.
# What was built is kept in build/, so that only what has changed is compiled, and nothing if nothing has. Without a
# C++ compiler or Python's headers nothing is built: that is said, and no error, as the reference backend serves then.
# PYTHON: the Python to build for, which has cmake, ninja and nanobind. CXX: the compiler (CXX=none: do without).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

compiles() {
  # shellcheck disable=SC2086  # CXX may be several words, as in "ccache g++"
  $1 -std=c++17 -x c++ -fsyntax-only - 2>/dev/null <<<'#include <optional>'
}
if [ -n "${CXX:-}" ]; then
  compiles "$CXX" || CXX=
else
  for CXX in c++ g++ clang++ ""; do
    [ -z "$CXX" ] || ! compiles "$CXX" || break
  done
fi
header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h
lacks=
[ -e "$header" ] || lacks="there is no $header; after 'apt install python3-dev'"
[ -n "$CXX" ] || lacks="no C++17 compiler was found (CXX, c++, g++, clang++); after 'apt install g++'"
if [ -n "$lacks" ]; then
  echo "== the CPU kernels are not compiled: $lacks (or the like) run the same command again. Without them Octavo needs" \
    "torch (scripts/install.py torch), and is many times slower" >&2
  exit 0
fi

bin=$(cd "$(dirname "$(command -v "$python")")" && pwd)
python=$bin/$(basename "$python")
# While pip builds, it hides the environment's packages and brings others; with the former nothing is compiled twice.
! env -u PYTHONPATH "$python" -c 'import cmake, nanobind, ninja' &>/dev/null || unset PYTHONPATH
PATH=$bin:$PATH
export CXX PATH NINJA_STATUS='[%f/%t, %e s] '
# A folder for each Python: CMake would go on with the version that it found first.
dir=build/cpu-$("$python" -c 'import sys; print(sys.implementation.cache_tag)')
# One that was copied along with its checkout names the files of the other.
if [ -e "$dir/CMakeCache.txt" ] && ! grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$(pwd -P)" "$dir/CMakeCache.txt"; then
  rm -r "$dir"
fi
mkdir -p "$dir"

# All where the best cannot be told: the compiler is one for another machine.
best=
if [ "${OCTAVO_ALL_ISAS:-0}" = 0 ]; then
  # shellcheck disable=SC2086
  best=$({ $CXX -std=c++17 -O1 -o "$dir/best_isa" csrc/cpu/best_isa.cpp && "$dir/best_isa"; } 2>/dev/null) || best=
fi
read -r floats integers <<<"$best"
case $best in
  "") sets="all instruction sets" ;;
  "generic generic") sets=generic ;;
  *) sets="$floats (floats), $integers (integers) and generic" ;;
esac
said=$(cmake -S . -B "$dir" -G Ninja -DPython_EXECUTABLE="$python" -DOCTAVO_FLOAT_SETS="$floats" \
  -DOCTAVO_INTEGER_SETS="$integers" \
  -DCMAKE_MAKE_PROGRAM="$(command -v ninja)" "$@" 2>&1) || { echo "$said" >&2; exit 1; }
steps=$(ninja -C "$dir" -n | grep -c '^\[') || true
if [ "$steps" != 0 ]; then
  echo "== compiling the CPU kernels for $sets with $CXX in $dir: $steps steps, kept for the next time"
  ninja -C "$dir"
fi
# install, not cp: overwriting a library in use would crash the process that runs it.
for module in "$dir"/_cpu*.so; do
  cmp --silent "$module" "octavo/${module##*/}" || install "$module" octavo/
done
