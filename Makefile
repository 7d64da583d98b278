# Two commands do everything on a fresh machine with Python 3.11+ and make:
#   make run    makes .venv, installs, profiles a training loop, predicts it on other chips, compares
#   make test   lint, types, import contracts, documentation, all tests
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check -q

.PHONY: run test lint types contracts docs browser tests search bench clean
.DELETE_ON_ERROR:

run: $(VENV)/.installed
	@PATH="$(abspath $(BIN)):$$PATH" sh examples/first_look.sh

# The checks run side by side: apt and pip wait for the network, and mypy has a core of its own. One of the tests builds the
# documentation.
test:
	$(MAKE) --no-print-directory -j2 --output-sync=target browser lint types contracts
	$(MAKE) --no-print-directory tests

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

contracts: $(VENV)/.dev
	$(BIN)/lint-imports --no-cache

# Strict: a broken link or a reference to something that does not exist fails.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q -f mkdocs.yml

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

# Two files at a time, as many tests wait for a process or a clock. A file stays in one worker: its fixtures are made
# once. One thread each for torch: threads that spin while they wait would take the other worker's core. A worker that
# crashes ends the run, red: xdist would wait for ever for the rest of its file. Bytecode is kept, also where the
# environment says otherwise: hundreds of tests start an interpreter, and each would compile all of src again.
WORKERS ?= 2
tests: $(VENV)/.dev
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# The property tests on cases nobody has tried, N times over: what is found becomes an @example and is mended.
N ?= 10
search: $(VENV)/.dev
	for i in $$(seq $(N)); do HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -q -m hypothesis -p no:cacheprovider || exit 1; done

# What a GPU-less machine can prove in about half an hour; the H200's part is benchmarks/device/ (see benchmarks/README.md).
# Left out, each with its command on the page: fuzz_traces.py 100000 (half an hour), analyze_trace.py and ranks64.py (they
# need HolisticTraceAnalysis or the GPT-2 recording), the fits.
bench: $(VENV)/.dev
	$(BIN)/python benchmarks/measure/import_time.py
	$(BIN)/python benchmarks/measure/memory_24h.py
	$(BIN)/python benchmarks/measure/scope_cost.py
	$(BIN)/python benchmarks/fit/fit_response.py
	$(BIN)/python benchmarks/fit/replay_accuracy.py
	$(BIN)/python benchmarks/measure/limit_windows.py
	$(BIN)/python benchmarks/predict/flops.py
	$(BIN)/python benchmarks/predict/predict_time.py
	$(BIN)/python benchmarks/predict/cpu_dispatch.py
	$(BIN)/python benchmarks/measure/attribution.py --json benchmarks/results/attribution.json
	$(BIN)/python benchmarks/measure/region_cost.py
	$(BIN)/python benchmarks/measure/summary_24h.py
	$(BIN)/python benchmarks/measure/kill9.py
	$(BIN)/python benchmarks/measure/faults.py
	$(BIN)/python benchmarks/measure/export_million.py
	$(BIN)/python benchmarks/measure/page_speed.py
	$(BIN)/python benchmarks/measure/diff_aa.py
	$(BIN)/python benchmarks/measure/op_host_cost.py benchmarks/results/op_host_cost.json
	$(BIN)/python benchmarks/measure/error_bounds.py benchmarks/results/error_bounds.json
	$(BIN)/python benchmarks/device/checkpointing.py benchmarks/results/checkpoint_plan.json --plan-only
	$(BIN)/python benchmarks/device/checkpointing.py benchmarks/results/checkpoint_reorder.json --reorder
	$(BIN)/python benchmarks/measure/schedule_cost.py benchmarks/results/schedule_cost.json
	$(BIN)/python benchmarks/measure/schedule_plant.py benchmarks/results/schedule_plant.json
	$(BIN)/python benchmarks/measure/actuator_faults.py 1000
	$(BIN)/python benchmarks/fuzz/fuzz_parsers.py 100000
	$(BIN)/python benchmarks/measure/soak.py --minutes 10
	$(BIN)/python benchmarks/measure/first_hour.py
	$(BIN)/python benchmarks/page/build.py

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
	$(PIP) install --no-compile -c constraints.txt -e '.[dev,amd,intel]'
# pip would compile on one core. Some packages hold templates that are no Python: as with pip, they stay as they are.
	@$(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	touch $@ $(VENV)/.installed
