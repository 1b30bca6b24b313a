# Every job is one target. Needs python3 (3.10 or newer), git and make; the rest is installed here.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO_DIR ?= demo
STORE ?= file
PYTEST_ARGS ?=

.PHONY: help setup demo test soak azurite browser spin lint bench docs clean
.DEFAULT_GOAL := help

help:
	@echo "make setup   make .venv and install Forebay with all that its tests need"
	@echo "make demo    train, kill, resume, compare: a table and demo/summary.json"
	@echo "              STORE=s3: on a real S3 server, started for it; s3-faulty, s3-restart: disturbed"
	@echo "make test    run all tests"
	@echo "make soak    the long loops of kills, faults and fuzzing, an hour or more"
	@echo "make azurite install the emulator that the tests of Azure need (npm)"
	@echo "make browser install the Chromium that the tests of the report need (Debian, root)"
	@echo "make spin    install the model checker that the test of the commit needs (Debian, root)"
	@echo "make lint    ruff and mypy"
	@echo "make bench   pause against a plain copy, drain against the disk"
	@echo "make docs    links of the documents, and the listed names against the exported ones"
	@echo "make clean   remove .venv and caches"

$(STAMP): pyproject.toml constraints-dev.txt
	@command -v $(PYTHON) >/dev/null || \
	  { echo "forebay: $(PYTHON) is not there: install python3 (3.10 or newer), or make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "forebay: python3 is older than 3.10: install a newer one, or make PYTHON=/path/to/python3"; exit 1; }
	@echo "== making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "forebay: python3 cannot make a venv: install its venv package (Debian: python3-venv)"; exit 1; }
	@echo "== installing Forebay and what its demo and tests need (about 1 GB with torch)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints-dev.txt -e '.[dev]'
	@touch $@

setup: $(STAMP)

demo: $(STAMP)
	$(BIN)/forebay demo --directory $(DEMO_DIR) --store $(STORE)

test: $(STAMP)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

# The long loops: hundreds of kills, every fault at every call. An hour or more; each test has its own deadline.
soak: $(STAMP)
	$(BIN)/python -m pytest -m soak -s --timeout 14400 $(PYTEST_ARGS)

# Microsoft's store emulator, for the tests of az:// URLs; they are skipped where it is not.
azurite: $(STAMP)
	npm install --no-audit --no-fund --silent --prefix $(VENV)/azurite azurite@3

# Debian's Chromium, for the tests of the report in a browser; they are skipped where it is not.
browser:
	command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends chromium)

# Debian's Spin, for the model of the commit; its tests are skipped where it or a C compiler is not.
spin:
	command -v spin >/dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends spin)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m bench.pause
	$(BIN)/python -m bench.drain
	$(BIN)/python -m bench.upload
	$(BIN)/python -m bench.plan
	$(BIN)/python -m bench.predict

docs: $(STAMP)
	$(BIN)/python -m pytest tests/rules/test_links.py tests/rules/test_exports.py

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
