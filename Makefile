# every target installs what it needs into .venv; CONTRIBUTING.md says what that is and how long it takes
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
OVERLAYS = $(VENV)/overlays/.ready
OLAH = $(VENV)/olah
ENGINE = $(VENV)/engines/.one
ENGINES = $(VENV)/engines/.all
FOLDERS = DSPINE_OVERLAYS=$(abspath $(VENV)/overlays) DSPINE_ENGINES=$(abspath $(VENV)/engines) \
	DSPINE_OLAH=$(abspath $(OLAH))
# one engine, started for real; `make test-all` starts all
ENGINE_TEST = tests/sglang_plugin/test_engines.py -k "acceptance or drafts_are"

.PHONY: demo test test-all lint format docs clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first: left to a dependency, pip may pick a build several GB larger
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps triton
	touch $@

$(ENGINE): $(READY) tests/helpers/sglang_engines.py tests/helpers/overlays.py
	$(BIN)/python tests/helpers/sglang_engines.py $(VENV)/engines $(VENV)/overlays --only 0.5.23
	touch $@

$(ENGINES): $(ENGINE)
	$(BIN)/python tests/helpers/sglang_engines.py $(VENV)/engines $(VENV)/overlays
	touch $@

$(OVERLAYS): $(READY) tests/helpers/overlays.py
	$(BIN)/python tests/helpers/overlays.py $(VENV)/overlays
	# a mirror by other people: it reads what we published, in a process of its own
	$(BIN)/python -m pip install --quiet --upgrade --target $(OLAH) olah==0.5.4
	touch $@

demo: $(READY)
	$(BIN)/dspine-hub demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/tables.py --check
	$(BIN)/python docs/cli_reference.py --check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint $(ENGINE)
	$(FOLDERS) $(BIN)/python -m pytest -n 2 -m "not slow and not overlay and not sglang"
	$(FOLDERS) $(BIN)/python -m pytest $(ENGINE_TEST)

test-all: lint $(OVERLAYS) $(ENGINES) docs
	$(FOLDERS) $(BIN)/python -m pytest -n 2 -m "not sglang"
	$(FOLDERS) $(BIN)/python -m pytest -m sglang
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels/test_triton_kernels.py

docs: $(READY)
	$(BIN)/python -m sphinx -q -W -b html docs $(VENV)/docs
	@echo "$(VENV)/docs/index.html"

clean:
	rm -rf $(VENV)
