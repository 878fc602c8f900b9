# Needs Python 3.11, 3.12 or 3.13 with pip, and make. Everything is installed into .venv.
#
#   make demo    train the digits in one process, then on two local clusters, and compare; with
#                all that TensorFlow says of itself: make demo DEMO=--verbose
#   make test    the test suite
#   make test-all       the same, with the further combinations, long faults and campaigns
#   make test-rest      what of these `make test` leaves out
#   make test-fast      the tests of parts, and a short run of every strategy
#   make test-versions  every strategy and every hook, under all supported versions that are found;
#                flags: make test-versions VERSIONS="--only '*nightly'"
#   make coverage       lines that `make test` executes, in all processes
#   make coverage-all   lines that `make test-all` executes, and how many of these `make test` does
#   make mutants     whether tests find each of the faults of tests/faults_on_purpose; flags:
#                make mutants MUTANTS="--only '*residual*'"
#   make matrix      every name of Keras under every strategy; writes docs/works.md
#   make first-hour     what the first page, the tutorial and the page of two machines say, done in
#                an empty environment on two hosts of this machine (as root)
#   make measure        seconds, processor time, processes and traced functions of each file of tests
#   make structure      sizes, circles of imports, replaced functions and public names of the package
#   make wheel   the source distribution and the wheel in dist/, of the last commit or of a tag:
#                make wheel TAG=v0.2.0
#   make test-wheel  `make test-fast` with that wheel, in an environment for each Python; flags:
#                make test-wheel WHEEL="--only 3.12"
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
WHEEL ?=
MUTANTS ?=
TAG ?= HEAD
# Tests choose their tier themselves: tests/support/tiers.py.
TESTED := not extended and not matrix
PIP := $(BIN)/python -m pip --disable-pip-version-check
PACKAGING := pyproject.toml

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-rest test-fast test-versions mutants matrix first-hour measure coverage coverage-all structure wheel test-wheel bench docs lint clean

help:
	@sed -n 's/^#   //p' Makefile

# Each stamp says that .venv has the library with one extra, as pyproject.toml now has it.
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

TEST = $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

test: $(VENV)/stamp-test
	$(TEST) -m "$(TESTED)"

# As users have it: tests/support/graphs.py.
OPTIMISED = KERAS_PSPLUS_GRAPPLER=1

test-all: $(VENV)/stamp-test
	$(OPTIMISED) $(TEST) -m "not matrix"

# What `make test` leaves out.
test-rest: $(VENV)/stamp-test
	$(OPTIMISED) $(TEST) -m "extended and not matrix"

test-fast: $(VENV)/stamp-test
	$(TEST) -m "$(TESTED) and not processes"

# Goes on from what an earlier run has left in .matrix, and writes the page.
matrix: $(VENV)/stamp-test
	-MATRIX=.matrix $(BIN)/python -m pytest -n 3 --dist loadgroup tests/matrix/test_matrix.py
	$(BIN)/python tests/matrix/page.py .matrix tests/matrix/outcomes.md docs/works.md

first-hour: $(VENV)/stamp-test
	$(BIN)/python tests/docs/first_hour.py

mutants: $(VENV)/stamp-test
	$(BIN)/python tests/faults_on_purpose/run.py $(MUTANTS)

measure: $(VENV)/stamp-test
	rm -rf .measure
	$(TEST) -m "$(TESTED)" -p tests.support.measure --measure=.measure
	$(BIN)/python tests/support/measure.py .measure

test-versions:
	$(PYTHON) tests/versions/run.py $(VERSIONS)

COVERED = $(BIN)/coverage run -m $(subst $(BIN)/python -m ,,$(TEST))

coverage: $(VENV)/stamp-test
	$(BIN)/coverage erase
	$(COVERED) -m "$(TESTED)"
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

coverage-all: coverage
	mv .coverage .coverage-of-test
	-$(OPTIMISED) $(COVERED) -m "extended and not matrix"
	cp .coverage-of-test .coverage.of-test
	$(BIN)/coverage combine --quiet
	$(BIN)/python tests/support/share_covered.py .coverage-of-test .coverage

structure:
	@$(PYTHON) tests/structure.py

# Of what git has: files of this checkout that are not committed are in neither.
wheel: $(VENV)/stamp-test
	rm -rf build dist && mkdir -p build/source
	git archive $(TAG) | tar -x -C build/source
	@version=$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' build/source/keras_psplus/versions.py); \
	tags=$$(git tag --points-at $(TAG) --list 'v*'); \
	[ -z "$$tags" ] || [ "$$tags" = "v$$version" ] || { \
	  echo "The tag of a release is v and __version__ of keras_psplus/versions.py." \
	    "Received: tag $$tags, __version__ $$version" >&2; exit 1; }
	$(BIN)/python -m build --outdir dist build/source

# Of what `make wheel` has left in dist/.
test-wheel:
	$(PYTHON) tests/wheels/run.py $(WHEEL)

bench: $(VENV)/stamp-bench
	$(BIN)/python benchmarks/bench.py $(BENCH)

# The manual needs neither the library's dependencies nor the library: it reads the source.
$(VENV)/stamp-docs: $(VENV)/stamp-venv $(PACKAGING)
	$(PIP) install --quiet $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("$(PACKAGING)", "rb"))["project"]["optional-dependencies"]["docs"])')
	@touch $@

docs: $(VENV)/stamp-docs
	$(BIN)/mkdocs build --strict

lint: $(VENV)/stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/docs/docstrings.py
	$(BIN)/codespell README.md CHANGELOG.md CONTRIBUTING.md docs keras_psplus examples \
	  benchmarks tests

clean:
	rm -rf $(VENV) .venv-versions build dist site .drawings *.egg-info .coverage* .measure .matrix mutants.jsonl .pytest_cache .ruff_cache .hypothesis bench.* bench_*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
