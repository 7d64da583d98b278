# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make run    makes .venv, installs, profiles the example training script
#   make test   lint, types, import contracts, all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run test lint types contracts tests bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/tessera run examples/train.py

test: lint types contracts tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

tests: $(VENV)/.dev
	$(BIN)/python -m pytest -q

# What a GPU-less machine can prove; the H200's part is benchmarks/device/ (see benchmarks/README.md).
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/import_time.py
	$(BIN)/python benchmarks/memory_24h.py
	$(BIN)/python benchmarks/scope_cost.py
	$(BIN)/python benchmarks/fit_response.py
	$(BIN)/python benchmarks/replay_accuracy.py
	$(BIN)/python benchmarks/flops.py
	$(BIN)/python benchmarks/predict_time.py
	$(BIN)/python benchmarks/page.py

clean:
	rm -rf $(VENV) .bench .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tessera needs Python 3.11 or newer: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv $(VENV)

# torch's version is pinned by the constraints; which build (CPU or CUDA) is the registry's choice.
$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[torch]'
	touch $@

$(VENV)/.dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[dev,amd,intel]'
	touch $@ $(VENV)/.installed
