# make demo | make test | make setup. Variables, all optional:
#   PYTHON=python3.12                    the interpreter that .venv is made with (3.10 or newer)
#   TORCH="torch==2.13.0"                what is installed as PyTorch, before anything that depends on it
#   TORCH=                               install none: with VENV_FLAGS=--system-site-packages, use the system's
#   PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"   for every pip install: here, PyTorch's smaller
#                                        build for machines without a GPU
#   TRANSFORMERS="5.17.* 5.*"            versions that test-versions tries
#   JOBS=2                               tests at a time
#   PYTEST_FLAGS="-m gpu"                for make unit and make test: the tests of these flags, one at a time
PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
TORCH ?= torch==2.13.0
PIP_FLAGS ?=
TRANSFORMERS ?= 5.17.* 5.*
JOBS ?= 2
PYTEST_FLAGS ?=

# What a process compiles is kept for the next, whatever a container's image says: else torch and transformers take each
# of those that tests start some eight seconds more.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
STAMP := $(VENV)/.expertly-setup
DOCS_STAMP := $(VENV)/.expertly-docs
TRITON_STAMP := $(VENV)/.expertly-triton
PEERS_STAMP := $(VENV)/.expertly-peers
ZIG_STAMP := $(VENV)/.expertly-zig
DIST_STAMP := dist/.expertly-dist
WHEEL := build/wheel
WHEEL_STAMP := $(WHEEL)/.expertly-torch

.PHONY: help setup ready browser emulator demo test test-lab test-peers test-arm emulated macos lint types unit triton format docs dist test-dist test-versions clients clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up and let the demo model answer with a quarter of its experts in memory"
	@echo "make test    set up, lint, check types, run the tests"
	@echo "make test-lab    the tests of the second distribution, lab/"
	@echo "make setup   make $(VENV) with expertly and its development tools in it"
	@echo "make triton  the tests of the kernels over slots, in Triton's interpreter and compiler; no GPU is needed"
	@echo "make test-peers  llama.cpp's greedy tokens of files of every GGUF architecture beside ours"
	@echo "make test-arm    tests of the compiled code with code for aarch64, in an emulator; compile it for macOS"
	@echo "make clients six packages of clients against the server"
	@echo "make format  rewrite the code as 'make lint' wants it"
	@echo "make docs    write the tables of README and docs/ from bench/results, and the site into site/"
	@echo "make dist    the wheels and the source distributions of expertly and expertly-lab, in dist/"
	@echo "make test-dist      install the wheels in an environment of their own; run the demo and the lab from them"
	@echo "make test-versions  the tests of the engine with the oldest and the newest transformers that pyproject.toml names"
	@echo "make clean   remove $(VENV) and caches"

setup: $(STAMP)

# All that tests need and that takes one processor: for `make -j2 ready`, before what takes all of them.
ready: browser $(STAMP) $(WHEEL_STAMP) $(DIST_STAMP) $(TRITON_STAMP) $(PEERS_STAMP) $(ZIG_STAMP)

# The stamp is the last thing made, so a set-up that was interrupted starts over. PyTorch goes first and alone: as a
# dependency of something else pip may choose a build of several gigabytes. Systems that ship Python without ensurepip
# get their pip from the interpreter's own. Compiling all that is installed takes longer than what of it is imported.
$(STAMP): pyproject.toml setup.py lab/pyproject.toml $(shell find src -name '*.[ch]')
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "expertly needs Python 3.10 or newer; this is " + sys.version.split()[0] + ": make PYTHON=...")'
	@$(PIP) --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV_FLAGS) $(VENV) || \
	    { $(PYTHON) -m venv --without-pip $(VENV_FLAGS) $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	@echo "Installing PyTorch, expertly and its development tools into $(VENV), compiling kernels: a few minutes."
	$(if $(strip $(TORCH)),$(PIP) install --quiet --no-compile $(PIP_FLAGS) "$(TORCH)")
	$(PIP) install --quiet --no-compile $(PIP_FLAGS) --editable '.[dev]' --editable ./lab
	@touch $@

demo: $(STAMP)
	$(BIN)/expertly run demo "What is the capital of France?" --memory 25% --max-new-tokens 100

# Types are checked, on one processor, beside the first of the tests.
test: browser $(STAMP)
	$(MAKE) --no-print-directory -j2 lint types unit
	$(if $(filter Linux,$(shell uname -s)),$(MAKE) --no-print-directory triton)

# Pages are tested in a real browser: one that is there, else Debian's where it may be installed.
browser:
	@for name in chromium chromium-browser google-chrome chrome; do command -v $$name >/dev/null && exit 0; done; \
	    root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	    install="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20"; \
	    { $$install update && $$install install -y --no-install-recommends chromium; } </dev/null >/dev/null 2>&1 || \
	    echo "No Chromium here, and none can be installed: tests of pages in a browser will be skipped."

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Each worker begins with a part of the files, and takes over some of another's when it is done.
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal

unit: $(STAMP)
ifeq ($(strip $(PYTEST_FLAGS)),)
	$(PYTEST) tests
else
	$(BIN)/python -m pytest -q $(PYTEST_FLAGS)
endif

test-lab: $(STAMP)
	$(PYTEST) lab/tests

# In a folder of its own: beside torch it makes processes that import torch._dynamo 70 MiB larger, which tests would see.
$(TRITON_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) --target $(VENV)/triton "triton>=3.5,<4"
	@touch $@

triton: $(TRITON_STAMP)
	PYTHONPATH=$(abspath $(VENV)/triton) $(PYTEST) tests/native/test_triton.py

# In a folder of its own: nothing else may come to need it. Only as a wheel, as it takes long to compile.
$(PEERS_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) --only-binary :all: --target $(VENV)/peers "xllamacpp>=2026.10.11549"
	@touch $@

test-peers: $(PEERS_STAMP)
	EXPERTLY_TEST_REQUIRES=xllamacpp PYTHONPATH=$(abspath $(VENV)/peers) $(PYTEST) tests/formats/test_llama_cpp.py

# In two environments of their own, each of which takes less than a minute to make.
clients: $(STAMP)
	$(BIN)/python bench/clients.py --quick --venv build/clients

# A compiler and an emulator for aarch64: those that are there, else Debian's where they may be installed.
HAS_ARM := command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null
emulator:
	@$(HAS_ARM) || \
	    { root=; [ "$$(id -u)" = 0 ] || root="sudo -n"; \
	    install="$$root env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Acquire::Retries=1 -o Acquire::http::Timeout=20"; \
	    { $$install update && $$install install -y --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user-static; } \
	    </dev/null >/dev/null 2>&1; } || \
	    echo "No compiler or emulator for aarch64 here, and none can be installed: its code is NOT tested."

# Python is this machine's; its memory is the emulated process's, too (tests/native/arm).
ARM := build/arm
$(ARM)/caller: $(wildcard src/expertly/native/*.[ch] tests/native/arm/*.[ch])
	@mkdir -p $(ARM)
	aarch64-linux-gnu-gcc -O2 -std=gnu11 -Wall -pthread -c -Dpread=pread_there -Dfstat=fstat_there -Dfcntl=fcntl_there -o $(ARM)/readers.o src/expertly/native/readers.c
	aarch64-linux-gnu-gcc -O1 -std=gnu11 -Wall -pthread -rdynamic -o $@ tests/native/arm/caller.c src/expertly/native/products*.c $(ARM)/readers.o -lm
	$(CC) -O2 -Wall -shared -fPIC -o $(ARM)/memory.so tests/native/arm/memory.c

# Zig brings a C compiler with the headers of macOS; in a folder of its own, as it is 400 MB.
$(ZIG_STAMP): $(STAMP)
	$(PIP) install --quiet --no-compile --only-binary :all: --target $(VENV)/zig "ziglang>=0.17,<0.18"
	@touch $@

macos: $(ZIG_STAMP)
	@mkdir -p $(ARM)
	for source in src/expertly/native/*.c src/expertly/policies/*.c; do \
	    PYTHONPATH=$(VENV)/zig ZIG_GLOBAL_CACHE_DIR=$(ARM)/zig $(BIN)/python -m ziglang cc -target aarch64-macos -O1 -std=gnu11 -Wall -Werror \
	        -c -o $(ARM)/macos.o $$source || exit 1; done

test-arm: $(STAMP) emulator macos
	@if $(HAS_ARM); then $(MAKE) --no-print-directory emulated; fi

emulated: $(STAMP) $(ARM)/caller
	EXPERTLY_EMULATED="qemu-aarch64-static -L /usr/aarch64-linux-gnu $(ARM)/caller" PYTHONMALLOC=malloc LD_PRELOAD=$(abspath $(ARM)/memory.so) \
	    $(BIN)/python -m pytest -q -p tests.native.arm.plugin tests/native/test_products.py tests/native/test_activations.py \
	    tests/native/test_attention.py tests/native/test_tiles.py tests/native/test_instruction_sets.py tests/engine/test_transfer.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet $(PIP_FLAGS) --editable '.[docs]'
	@touch $@

docs: $(DOCS_STAMP)
	$(BIN)/python tools/docs_tables.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(DIST_STAMP)

$(DIST_STAMP): $(STAMP) MANIFEST.in setup.py README.md $(shell find src lab/src -type f -not -name '*.so' -not -name '*.pyc' -not -path '*.egg-info/*')
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist . >/dev/null
	$(BIN)/python -m build --no-isolation --outdir dist lab >/dev/null
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
	$(WHEEL)/bin/pip install --quiet --no-compile $(PIP_FLAGS) dist/expertly-*.whl
	! $(WHEEL)/bin/expertly lab
	cd $(WHEEL) && bin/expertly run demo "What is the capital of France?" --memory 25% --max-new-tokens 20
	$(WHEEL)/bin/pip install --quiet --no-compile $(PIP_FLAGS) dist/expertly_lab-*.whl
	rm -rf $(WHEEL)/trace && cd $(WHEEL) && bin/expertly lab trace synth trace --tokens 50 && \
	    bin/expertly lab simulate trace --system lru,adapmoe --memory 25%

test-versions: $(STAMP)
	set -e; for version in $(TRANSFORMERS); do rm -rf build/versions; $(PYTHON) -m venv build/versions; \
	    $(if $(strip $(TORCH)),build/versions/bin/pip install --quiet $(PIP_FLAGS) "$(TORCH)";) \
	    build/versions/bin/pip install --quiet $(PIP_FLAGS) --editable '.[dev]' "transformers==$$version"; \
	    build/versions/bin/python -m pytest -q tests/model tests/engine/test_lossless.py tests/cli/test_run.py; done

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache build dist site
	find src -name '*.so' -delete
	find src lab tests tools bench -name __pycache__ -type d -exec rm -rf {} +
