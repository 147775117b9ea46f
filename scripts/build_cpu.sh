#!/usr/bin/env bash
# Builds octavo/_cpu in place, for work on the kernels: scripts/build_cpu.sh [cmake options]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
dir=${BUILD_DIR:-build/cpu}
bin=$(dirname "$python")
PATH="$(cd "$bin" && pwd):$PATH"
cmake -S . -B "$dir" -G Ninja -DPython_EXECUTABLE="$(command -v python)" "$@" >/dev/null
cmake --build "$dir"
# Not copied over the old one: a process that runs it would crash.
install "$dir"/_cpu*.so octavo/
