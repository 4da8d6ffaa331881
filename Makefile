# make demo | make test | make setup. Variables, all optional:
#   PYTHON=python3.12                    the interpreter that .venv is made with (3.10 or newer)
#   TORCH="torch==2.13.0"                what is installed as PyTorch, before anything that depends on it
#   TORCH=                               install none: with VENV_FLAGS=--system-site-packages, use the system's
#   PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"   for every pip install: here, PyTorch's smaller
#                                        build for machines without a GPU
#   TRANSFORMERS="5.17.* 5.*"            versions that test-versions tries
#   JOBS=2                               tests at a time; those marked "alone" come after the others
#   PYTEST_FLAGS="-m gpu"                for make unit and make test: the tests of these flags, one at a time
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
TRANSFORMERS ?= 5.17.* 5.*
JOBS ?= 2
PYTEST_FLAGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.expertly-setup
DOCS_STAMP := $(VENV)/.expertly-docs
TRITON_STAMP := $(VENV)/.expertly-triton
DIST_STAMP := dist/.expertly-dist
WHEEL := build/wheel
WHEEL_STAMP := $(WHEEL)/.expertly-torch

.PHONY: help setup ready demo test lint types unit triton format docs compiled dist test-dist test-versions clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up and let the demo model answer with a quarter of its experts in memory"
	@echo "make test    set up, lint, check types, run the tests"
	@echo "make setup   make $(VENV) with expertly and its development tools in it"
	@echo "make triton  the tests of the kernels over slots, in Triton's interpreter and compiler; no GPU is needed"
	@echo "make format  rewrite the code as 'make lint' wants it"
	@echo "make docs    write the tables of README and docs/ from bench/results, and the site into site/"
	@echo "make compiled       a compiled copy of the package in build/compiled, which simulates in half the time (docs/architecture.md)"
	@echo "make dist    the wheel and the source distribution, in dist/"
	@echo "make test-dist      install that wheel in an environment of its own; run the demo, and a test, from it"
	@echo "make test-versions  the tests of the engine with the oldest and the newest transformers that pyproject.toml names"
	@echo "make clean   remove $(VENV) and caches"

setup: $(STAMP)

# All that tests need and that takes one processor: for `make -j2 ready`, before what takes all of them.
ready: $(STAMP) $(WHEEL_STAMP) $(DIST_STAMP) $(TRITON_STAMP)

# The stamp is the last thing made, so a set-up that was interrupted starts over. PyTorch goes first and alone: as a
# dependency of something else pip may choose a build of several gigabytes. Systems that ship Python without ensurepip
# get their pip from the interpreter's own. Where there is a C compiler, installing builds the faster products.
$(STAMP): pyproject.toml $(shell find src -name '*.[ch]')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "expertly needs Python 3.10 or newer; this is " + sys.version.split()[0] + ": make PYTHON=...")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || \
	    { $(PYTHON) -m venv --without-pip $(VENV_FLAGS) $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@echo "Installing PyTorch, expertly and its development tools into $(VENV), compiling kernels: a few minutes."
	$(if $(strip $(TORCH)),$(PIP) install --quiet $(PIP_FLAGS) "$(TORCH)")
	$(PIP) install --quiet $(PIP_FLAGS) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	$(BIN)/expertly run demo "The old man looked at the sea and said" --memory 25% --max-new-tokens 100

test: lint types unit $(if $(filter Linux,$(shell uname -s)),triton)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
ifeq ($(strip $(PYTEST_FLAGS)),)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -q -p no:schemathesis -m alone $$(grep -rl --include='*.py' 'mark\.alone' tests)
else
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)
endif

# In a folder of its own: beside torch it makes processes that import torch._dynamo 70 MiB larger, which tests would see.
$(TRITON_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) --target $(VENV)/triton "triton>=3.5,<4"
	@touch $@

triton: $(TRITON_STAMP)
	PYTHONPATH=$(abspath $(VENV)/triton) $(BIN)/python -m pytest -q -n $(JOBS) tests/native/test_triton.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) --editable '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/python tools/docs_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A copy, since a compiled module beside its source would hide later edits of that.
compiled: build/compiled

build/compiled: $(STAMP) setup.py mypyc.ini $(shell find src -name '*.py')
	rm -rf $@ build/lib*
	$(PIP) install --quiet --no-deps --no-build-isolation --target $@ .
	@touch $@

dist: $(DIST_STAMP)

$(DIST_STAMP): $(STAMP) setup.py mypyc.ini MANIFEST.in README.md $(shell find src -type f -not -name '*.so' -not -name '*.pyc' -not -path '*.egg-info/*')
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	@ls -l dist
	@touch $@

# It runs twice: compiling all that is installed would take longer than running what of it is imported.
$(WHEEL_STAMP):
	rm -rf $(WHEEL)
	$(PYTHON) -m venv $(WHEEL)
	$(if $(strip $(TORCH)),$(WHEEL)/bin/pip install --quiet --no-compile $(PIP_FLAGS) "$(TORCH)")
	@touch $@

# Elsewhere than in the checkout, so that nothing but the wheel is found; in a new environment each time.
test-dist: $(DIST_STAMP) $(WHEEL_STAMP)
	@rm $(WHEEL_STAMP)
	$(WHEEL)/bin/pip install --quiet --no-compile $(PIP_FLAGS) dist/*.whl
	cd $(WHEEL) && bin/expertly run demo "The old man looked at the sea and said" --memory 25% --max-new-tokens 20
	$(WHEEL)/bin/pip install --quiet --no-compile $(PIP_FLAGS) pytest pytest-timeout
	$(WHEEL)/bin/python -m pytest -q tests/test_wheel.py

test-versions: $(STAMP)
	set -e; for version in $(TRANSFORMERS); do rm -rf build/versions; $(PYTHON) -m venv build/versions; \
	    $(if $(strip $(TORCH)),build/versions/bin/pip install --quiet $(PIP_FLAGS) "$(TORCH)";) \
	    build/versions/bin/pip install --quiet $(PIP_FLAGS) --editable '.[dev]' "transformers==$$version"; \
	    build/versions/bin/python -m pytest -q tests/model tests/engine/test_lossless.py tests/cli/test_run.py; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site
	find src -name '*.so' -delete
	find src tests tools bench -name __pycache__ -type d -exec rm -rf {} +
