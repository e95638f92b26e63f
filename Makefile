# Each target works as the first command in a new clone: it makes .venv and installs what it needs.
#
#   make lab      install, open JupyterLab on the first lesson
#   make demo     the same lesson executed without a browser, saved as one HTML page
#   make model    fetch the larger model of the README once; a notebook does it when it is first used
#   make test     install everything and run every check
#   make lint     ruff and mypy
#   make bench    measure speed on this machine
#   make install  only the installation
#
# PYTHON=python3.12 chooses the interpreter, LAB_ARGS="--no-browser --port 9000" goes to JupyterLab.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
MODEL := smollm2
LESSON := notebooks/01_thinker_and_writer.ipynb
DEMO := build/demo

# flash-linear-attention breaks transformers' Qwen3.5 where there is no GPU, so it comes only where
# an NVIDIA driver answers. The pins fit both: they name versions, and pip's torch for Linux is a
# CUDA build unless the machine is set up to find another.
ACCELERATOR := $(shell nvidia-smi >/dev/null 2>&1 && echo gpu || echo cpu)
EXTRAS_cpu := test,dev
EXTRAS_gpu := test,dev,gpu
STAMP := $(VENV)/installed-$(ACCELERATOR)

.PHONY: install lab demo test lint bench model chromium overlays clean-build

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, and '$(PYTHON)' is none:" \
	    "try make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@test -L asyncllm_nb/engine || { \
	  echo "asyncllm_nb/engine is no link: clone with git on Linux or macOS," \
	    "with core.symlinks on" >&2; exit 1; }
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(MAKE) --no-print-directory clean-build
	$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(RUN) -m pip install --disable-pip-version-check -e '.[$(EXTRAS_$(ACCELERATOR))]' -c constraints.txt
	@touch $@

# setuptools packs whatever an earlier wheel left in build/lib, deleted modules too.
clean-build:
	@rm -rf build/lib build/bdist.*

model: install
	$(RUN) -m asyncllm_nb.models fetch $(MODEL)

lab: install
	$(RUN) -m jupyterlab --ServerApp.root_dir='$(CURDIR)' --LabApp.default_url=/lab/tree/$(LESSON) \
	  $(if $(filter 0,$(shell id -u)),--allow-root) $(LAB_ARGS)

demo: install
	$(RUN) -m nbconvert --to html --execute --ExecutePreprocessor.timeout=600 \
	  --log-level=WARN --output-dir $(DEMO) $(LESSON)
	@echo "$(CURDIR)/$(DEMO)/$(basename $(notdir $(LESSON))).html"

lint: install
	$(RUN) -m ruff check .
	$(RUN) -m mypy

# Browser tests drive Debian's Chromium; without such tests nothing is installed.
chromium:
	@if ls tests/browser/test_*.py >/dev/null 2>&1 && ! command -v chromium >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium; \
	  else \
	    echo "the browser tests need Chromium: install the package 'chromium' as root" >&2; \
	    exit 1; \
	  fi; \
	fi

# Older ipykernels for the browser tests: each hides the installed one in kernels that find it first.
OVERLAYS := $(foreach version,6.31.0 7.3.0,$(VENV)/overlays/ipykernel-$(version))

overlays: $(OVERLAYS)

$(VENV)/overlays/ipykernel-%: | $(STAMP)
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $@.part \
	  ipykernel==$* nest-asyncio==1.6.0
	mv $@.part $@

test: install clean-build chromium overlays model
	$(RUN) tests/run_parts.py

bench: model
	$(RUN) -m benchmarks.cpu
