# `make demo` and `make test` set up everything they need in .venv
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
READY = $(VENV)/.ready
OVERLAYS = $(VENV)/overlays/.ready
OLAH = $(VENV)/olah
ENGINES = $(VENV)/engines/.ready

.PHONY: demo test lint format clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	# torch first: left to a dependency, pip may pick a build several GB larger
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(BIN)/python -m pip install --quiet -c constraints.txt --no-deps triton
	touch $@

$(OVERLAYS): $(READY) tests/helpers/overlays.py
	$(BIN)/python tests/helpers/overlays.py $(VENV)/overlays
	# a mirror by other people: it reads what we published, in a process of its own
	$(BIN)/python -m pip install --quiet --upgrade --target $(OLAH) olah==0.5.4
	touch $@

$(ENGINES): $(READY) tests/helpers/sglang_engines.py
	$(BIN)/python tests/helpers/sglang_engines.py $(VENV)/engines
	touch $@

demo: $(READY)
	$(BIN)/dspine-hub demo

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python benchmarks/tables.py --check

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint $(OVERLAYS) $(ENGINES)
	DSPINE_OVERLAYS=$(VENV)/overlays DSPINE_ENGINES=$(abspath $(VENV)/engines) DSPINE_OLAH=$(abspath $(OLAH)) \
		$(BIN)/python -m pytest
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/test_triton_kernels.py

clean:
	rm -rf $(VENV)
