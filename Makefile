# make demo   runs the main job on the embedded model      make test    runs the whole test suite
# make check  is what CI runs                              make install only makes the environment
# make test-sglang   tests the plugin inside SGLang, in an environment of its own (make install-sglang)

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

SGLANG_VENV ?= .venv-sglang
SGLANG_BIN := $(SGLANG_VENV)/bin
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: install install-sglang demo test test-sglang check lint format clean

install: $(STAMP)

# torch goes first, so that nothing else chooses its build. nixl declares CUDA wheels of several GB and
# xgrammar triton (1 GB), which host memory does not need, hence --no-deps.
$(STAMP): pyproject.toml Makefile
	@echo "installing into $(VENV) ..." >&2
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q $(TORCH) >&2
	@$(BIN)/pip install -q -e '.[native,bench,dev]' >&2
	@$(BIN)/pip install -q --no-deps nixl==1.5.2 nixl-cu13==1.5.1 xgrammar==0.2.9 >&2
	@touch $@

demo: install
	@$(BIN)/python -m aioprefill demo $(ARGS)

test: install
	$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),--cov)

# SGLang lives in an environment of its own, 2.7 GB: its pins differ, and its dependencies want a GPU.
install-sglang: $(SGLANG_STAMP).plugin
	@tests_sglang/get_ibverbs.sh $(SGLANG_BIN)/python $(SGLANG_VENV)/rdma || echo "NOTE: libibverbs.so.1 is \
	missing and could not be fetched, so tests_sglang/test_pair.py is skipped; apt-get install libibverbs1" >&2

$(SGLANG_STAMP): tests_sglang/requirements.txt
	@echo "installing SGLang into $(SGLANG_VENV) ..." >&2
	@test -x $(SGLANG_BIN)/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_BIN)/pip install -q -r tests_sglang/requirements.txt >&2
	@$(SGLANG_BIN)/pip install -q --no-deps sglang==0.5.23 mooncake-transfer-engine-non-cuda >&2
	@touch $@

# The entry point is found by the metadata of an installation, so this follows pyproject.toml.
$(SGLANG_STAMP).plugin: $(SGLANG_STAMP) pyproject.toml
	@$(SGLANG_BIN)/pip install -q --no-deps -e . >&2
	@touch $@

test-sglang: export OMP_NUM_THREADS = 1
test-sglang: install-sglang
	$(SGLANG_BIN)/python -m pytest -rs -c tests_sglang/pytest.ini tests_sglang $(ARGS)

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(SGLANG_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
