#!/usr/bin/env bash
# Builds octavo/_cpu in place: scripts/build_cpu.sh [cmake options]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
dir=${BUILD_DIR:-build/cpu}
bin=$(dirname "$python")
PATH="$(cd "$bin" && pwd):$PATH"
cmake -S . -B "$dir" -G Ninja -DPython_EXECUTABLE="$(command -v python)" "$@" >/dev/null
cmake --build "$dir"
# install, not cp: overwriting a library in use would crash the process that runs it.
install "$dir"/_cpu*.so octavo/
