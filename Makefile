# Needs Python 3.11, 3.12 or 3.13 with pip, and make. Everything is installed into .venv.
#
#   make demo    train the digits in one process, then on two local clusters, and compare; with
#                all that TensorFlow says of itself: make demo DEMO=--verbose
#   make test    the test suite
#   make test-all       the same, with the further combinations of tests/extended.py
#   make test-fast      the tests of parts, and a short run of every strategy
#   make test-versions  every strategy and every hook, under all supported versions that are found;
#                flags: make test-versions VERSIONS="--only '*nightly'"
#   make coverage       lines that the fast tests execute, in all of their processes
#   make structure      sizes, circles of imports, replaced functions and public names of the package
#   make wheel   the source distribution and the wheel in dist/
#   make bench   the benchmark lab; as root over emulated links; flags: make bench BENCH="--quick"
#   make docs    the manual as a web site in site/
#   make lint    ruff, mypy, codespell and the rule of docstrings
#   make clean   remove everything that the other targets made

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH ?=
DEMO ?=
VERSIONS ?=
# What needs no cluster, or a short one.
FAST := tests/smoke tests/gpu tests/engine tests/keras_hooks tests/core tests/compression tests/updates \
	tests/native tests/chaos tests/test_arguments.py tests/test_layers.py tests/test_log.py \
	tests/datasets tests/files tests/test_versions.py tests/test_project.py tests/test_structure.py tests/test_errors.py
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGING := pyproject.toml setup.cfg setup.py

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-fast test-versions coverage structure wheel bench docs lint clean

help:
	@sed -n 's/^#   //p' Makefile

# Each stamp says that .venv has the library with one extra, as the packaging files now have it.
$(VENV)/stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' || { \
	  echo "keras_psplus needs Python 3.11, 3.12 or 3.13: make PYTHON=python3.12 ..." \
	    "Received: PYTHON=$(PYTHON), $$($(PYTHON) --version 2>&1)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(VENV)/stamp-%: $(VENV)/stamp-venv $(PACKAGING)
	$(PIP) install --quiet --editable ".[$*]"
	@touch $@

# Without any.
$(VENV)/stamp-library: $(VENV)/stamp-venv $(PACKAGING)
	$(PIP) install --quiet --editable .
	@touch $@

demo: $(VENV)/stamp-library
	@$(BIN)/python examples/demo.py $(DEMO)

TEST = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder \
	  --reruns 1 --rerun-show-tracebacks --rerun-except "did not end within"

test: $(VENV)/stamp-test
	$(TEST) -m "not extended"

test-all: $(VENV)/stamp-test
	$(TEST)

test-fast: $(VENV)/stamp-test
	$(BIN)/python -m pytest -n 3 --dist loadfile $(FAST)

test-versions:
	$(PYTHON) tests/versions/run.py $(VERSIONS)

coverage: $(VENV)/stamp-test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -n 3 --dist loadfile $(FAST)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

structure:
	@$(PYTHON) tests/structure.py

wheel: $(VENV)/stamp-test
	$(BIN)/python -m build --outdir dist

bench: $(VENV)/stamp-bench
	$(BIN)/python benchmarks/bench.py $(BENCH)

docs: $(VENV)/stamp-docs
	$(BIN)/mkdocs build --strict

lint: $(VENV)/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/docs/docstrings.py
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs keras_psplus strategies examples \
	  benchmarks tests

clean:
	rm -rf $(VENV) .venv-versions build dist site *.egg-info .coverage* .pytest_cache .ruff_cache .hypothesis bench.* bench_*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
