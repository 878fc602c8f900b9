# Needs Python 3.11 or 3.12 with pip, and make. Everything is installed into .venv.
#
#   make demo    train the digits in one process, then on two local clusters, and compare; with
#                all that TensorFlow says of itself: make demo DEMO=--verbose
#   make test    the whole test suite
#   make bench   the benchmark lab; as root over emulated links; flags: make bench BENCH="--quick"
#   make docs    the manual as a web site in site/
#   make lint    ruff
#   make clean   remove everything that the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?=
DEMO ?=
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGING := pyproject.toml setup.cfg setup.py

.DEFAULT_GOAL := help
.PHONY: help demo test bench docs lint clean

help:
	@sed -n 's/^#   //p' Makefile

# Each stamp says that .venv has the library with one extra, as the packaging files now have it.
$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { \
	  echo "keras_psplus needs Python 3.11 or 3.12: make PYTHON=python3.12 ..." \
	    "Received: PYTHON=$(PYTHON), $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/stamp-%: $(VENV)/stamp-venv $(PACKAGING)
	$(PIP) install --quiet --editable ".[$*]"
	@touch $@

demo: $(VENV)/stamp-examples
	@$(BIN)/python examples/demo.py $(DEMO)

test: $(VENV)/stamp-test
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

bench: $(VENV)/stamp-bench
	$(BIN)/python benchmarks/bench.py $(BENCH)

docs: $(VENV)/stamp-docs
	$(BIN)/mkdocs build --strict

lint: $(VENV)/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis bench.* bench_*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
