# `make demo` and `make test` are all that a newcomer needs: each sets up .venv by itself, once.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# Bytecode is kept: hundreds of processes import the same files.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest

# Seconds that all tests together may take. A single one has its own limit (pyproject.toml).
TEST_TIME_S := 4500

# Of `make chaos`: numbers and ranges, as in 0-4,7.
SEEDS ?= 0-19

.PHONY: help setup demo test check fmt fmt-check lint types arch unit bench chaos gpu-check clean

help: ## list the targets
	@awk -F ':.* ## ' '/^[a-z-]+:.* ## / {printf "  make %-10s %s\n", $$1, $$2}' Makefile

setup: $(READY) ## make .venv with everything that is pinned in constraints.txt
	@echo "$(VENV) is ready."

# The stamp is written last: a setup that was broken off is taken up again by the next call.
$(READY): setup.py constraints.txt scripts/find_python.sh
	@if ! $(PY) -c 'import pip, sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; then \
		python=$$(sh scripts/find_python.sh); \
		echo "Making $(VENV) with $$python: once, about 6 GB."; \
		"$$python" -m venv --clear $(VENV); \
	fi
	$(PY) -m pip install --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a small GPT on CPU, slow one rank, watch the job re-plan around it
	@$(VENV)/bin/malleus demo

test: $(READY) ## all tests that need no GPU
	@$(PYTEST) tests -m 'not gpu and not bench' --session-timeout=$(TEST_TIME_S)

check: $(READY) ## before every commit; under a minute
	@$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target \
		types fmt-check lint unit arch

fmt: $(READY) ## format, and fix what a tool can fix
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

fmt-check: $(READY)
	@$(PY) -m ruff format --check .

lint: $(READY) ## ruff and the spelling
	@$(PY) -m ruff check .
	@$(VENV)/bin/codespell

types: $(READY) ## mypy
	@$(PY) -m mypy

unit: $(READY) ## the pure packages
	@$(PYTEST) tests/unit -q

arch: $(READY) ## who may import what, sizes, words, flags
	@$(PYTEST) tests/architecture -q

bench: $(READY) ## planner, migrations, cost of the seams (paced), simulator; some minutes
	@$(PY) scripts/bench_planner.py
	@$(PYTEST) tests/bench -s -q
	@$(PY) scripts/results_page.py

chaos: $(READY) ## jobs under random faults, a line each; SEEDS=0-19 takes an hour or more
	@OMP_NUM_THREADS=1 $(PY) -m tests.chaos --seeds $(SEEDS)

gpu-check: $(READY) ## what needs a GPU; without one it says so
	@$(PY) scripts/gpu_check.py

clean: ## remove what runs leave behind; .venv stays
	rm -rf build dist demo-out *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis \
		.import_linter_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
