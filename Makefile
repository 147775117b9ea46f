# Everything is installed in .venv. Each set-up step leaves a stamp file there and is repeated only after a change of
# pyproject.toml (or of the step's script). The kernels are built in place, each time as far as something has changed.

PYTHON ?= python3
# Python version of the GPU machine.
GPU_PYTHON ?= 3.12
# Processes that run the tests in parallel, each file in one of them; each takes up to 5 GB.
PROCESSES ?= 2
# Further options for the GPU targets and for make test-all.
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
# Steps install into one environment.
.NOTPARALLEL:
.PHONY: help demo test test-all kernels lint format site wheel gpu-site gpu-test gpu-memcheck gpu-bench gpu-smoke clean

help:
	@echo "make demo          set up, download the demo model and answer a few questions"
	@echo "make test          set up and run the test suite"
	@echo "make test-all      all tests that this machine can run, slow ones too (hours); lists what was skipped, and why"
	@echo "make kernels       set up and compile the CPU kernels, as far as they have changed"
	@echo "make lint          check style, types, imports, unused code and links"
	@echo "make format        format the code and sort the imports"
	@echo "make site          make the documentation as pages, in build/site; a broken link fails"
	@echo "make wheel         build the wheel for this Python, with all instruction sets, and try it in an empty environment"
	@echo "make gpu-test      run the tests that need a GPU with $(PYTHON), without installing anything"
	@echo "make gpu-memcheck  run the GPU tests of the kernels under compute-sanitizer (slow)"
	@echo "make gpu-bench     run the GPU benchmark; figures in build/gpu-bench (make gpu-smoke: a dry run on the CPU)"
	@echo "make gpu-site      download packages for a GPU machine without a network into .site (GPU_PYTHON=3.12)"
	@echo "make clean         remove the virtual environment, caches and build folders"
	@echo
	@echo "PYTHON=python3.12 make ... uses another Python (3.11 or newer) for the virtual environment."

# Without kernels, for lack of a compiler, torch computes.
demo: kernels
	@ls octavo/_cpu*.so >/dev/null 2>&1 || $(BIN)/python scripts/install.py torch
	@$(BIN)/python scripts/demo.py

# The tests start some hundred processes: none compiles the package anew, whatever is set outside.
test: $(VENV)/.installed-test kernels
	@echo "== running the test suite"
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(PROCESSES) --dist loadfile --no-loadscope-reorder

test-all: export OCTAVO_ALL_ISAS := 1
test-all: $(VENV)/.installed-test $(VENV)/.installed-ray $(VENV)/.installed-tracing $(VENV)/.installed-llama-index $(VENV)/.installed-site $(VENV)/.installed-release kernels
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python scripts/test_all.py $(PROCESSES) $(ARGS)

kernels: $(VENV)/.installed
	@PYTHON=$(BIN)/python scripts/build_cpu.sh

lint: $(VENV)/.installed-dev
	@echo "== ruff check"
	@$(BIN)/ruff check .
	@echo "== ruff format --check"
	@$(BIN)/ruff format --check .
	@echo "== mypy"
	@$(BIN)/mypy
	@echo "== imports, unused code, links"
	@$(BIN)/python scripts/rules.py

format: $(VENV)/.installed-dev
	@$(BIN)/ruff check --fix --exit-zero --quiet .
	@$(BIN)/ruff format .

site: $(VENV)/.installed-site
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet
	@echo "== wrote build/site/index.html"

wheel: $(VENV)/.installed-release
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/release_wheel.py dist

gpu-test:
	@PYTHON=$(PYTHON) scripts/gpu_test.sh $(ARGS)

# Torch's memory pool would hide reads past the end of a tensor.
gpu-memcheck:
	@PYTHON=$(PYTHON) PYTORCH_NO_CUDA_MEMORY_CACHING=1 LAUNCHER="compute-sanitizer --tool memcheck --error-exitcode 9" \
	  scripts/gpu_test.sh -k "triton and not graph and not captured" --timeout=3000 $(ARGS)

gpu-bench:
	@$(PYTHON) scripts/gpu_bench.py $(ARGS)

gpu-smoke: $(VENV)/.installed-test kernels
	@$(BIN)/python scripts/gpu_bench.py --smoke $(ARGS)

gpu-site:
	@$(PYTHON) scripts/gpu_site.py --python $(GPU_PYTHON)

clean:
	@echo "== removing $(VENV), caches and build folders"
	@rm -rf $(VENV) .site build octavo/_cpu*.so dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) was not found: Octavo needs Python 3.11 or newer" \
	  "(PYTHON=/path/to/python3.12 make ...)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "$(PYTHON) is" \
	  "$$($(PYTHON) --version): Octavo needs Python 3.11 or newer (PYTHON=/path/to/python3.12 make ...)" >&2; exit 1; }
	@echo "== creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "$(PYTHON) cannot create a virtual environment;" \
	  "on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# With what compiles the kernels, but without them: they are built in place.
$(VENV)/.installed: $(VENV)/.created pyproject.toml scripts/install.py
	@echo "== installing octavo and its requirements"
	@$(BIN)/python scripts/install.py --editable build
	@touch $@

# Requirements of an extra, by name: octavo itself is not installed again.
$(VENV)/.installed-%: $(VENV)/.installed
	@echo "== installing the requirements of the extra $*"
	@$(BIN)/python scripts/install.py $*
	@touch $@
