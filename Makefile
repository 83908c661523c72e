# make demo   runs the main job on the embedded model      make test    runs the whole test suite
# make check  is what CI runs                              make install only makes the environment

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
ARGS ?=
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install demo test check lint format clean

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

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
