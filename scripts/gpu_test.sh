#!/bin/sh
# Runs the tests that need a GPU from a plain checkout with the machine's Python, without installing anything.
#   scripts/gpu_test.sh [pytest options]
# PYTHON: another Python. LAUNCHER: a program to run it under (compute-sanitizer). Packages that this Python lacks are
# taken from .site (make gpu-site), and listed if they are missing there.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
# Only if needed: .site is built for one Python version, and would hide installed packages.
"$python" -c 'import gguf, ml_dtypes, msgspec, pydantic, zmq' 2>/dev/null || PYTHONPATH="$PYTHONPATH:$PWD/.site"

"$python" - <<'PYTHON'
import importlib.util
import sys

needed = """torch triton numpy ml_dtypes transformers tokenizers safetensors msgspec pydantic yaml gguf huggingface_hub
jinja2 filelock tqdm psutil zmq pytest pytest_timeout hypothesis""".split()
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(
        f"{sys.executable} (Python {sys.version.split()[0]}) lacks: {', '.join(missing)}\n"
        "'make gpu-site' on a machine with a network puts the small ones into .site; carry that folder along"
    )
import torch

if not torch.cuda.is_available():
    sys.exit(f"torch {torch.__version__} sees no GPU")
print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, Python {sys.version.split()[0]}")
PYTHON

# Only files with GPU tests, as pytest imports all files that it is given and others may need missing packages. Those of
# the architectures compare with the CPU kernels as well.
pattern='mark\.gpu\b'
if "$python" -c 'import octavo._cpu' 2>/dev/null; then
  pattern="$pattern|zoo: [A-Za-z]*Zoo"
else
  echo "without the architectures: the CPU kernels are not compiled (scripts/build_cpu.sh)"
fi
files=$(grep -rlE "$pattern" --include='test_*.py' tests)
# shellcheck disable=SC2086  # one word a file
exec ${LAUNCHER:-} "$python" -m pytest -m gpu -p no:cacheprovider "$@" $files
