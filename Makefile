# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make run    makes .venv, installs, profiles the example training script
#   make test   lint, types, import contracts, all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run test lint types contracts browser tests bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	$(BIN)/tessera run examples/train.py

test: lint types contracts browser tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

# The pages are tested in a real Chromium where there is one, or where it may be installed; else those tests are skipped.
browser:
	@if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing chromium for the browser tests"; \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver; } >/dev/null 2>&1 \
	    || echo "chromium could not be installed: the browser tests are skipped"; \
	else \
	  echo "no chromium: the browser tests are skipped; sudo apt-get install chromium chromium-driver"; \
	fi

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
	$(BIN)/python benchmarks/attribution.py --json benchmarks/results/attribution.json
	$(BIN)/python benchmarks/region_cost.py
	$(BIN)/python benchmarks/summary_24h.py
	$(BIN)/python benchmarks/kill9.py
	$(BIN)/python benchmarks/export_million.py
	$(BIN)/python benchmarks/page_speed.py
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
