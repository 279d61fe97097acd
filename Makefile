# make demo   see agent sessions routed over emulated engines, and decisions explained
# make phoenix   the same in a tracing UI: installs Arize Phoenix into an environment of its own, and plays a hot spot
# make test   run every test that needs nothing but the packages
# make test-fast   the quick ones of them, in parallel: under a minute
# make browser-test   the live page in Chromium (Debian: apt install chromium)
# make mutation MUTANTS='smetric.policy.snapshot*'   change the code of policies, and list the changes that no test catches
# make docs   build the manual's site into build/site; a broken link or anchor fails
# make lint   ruff and mypy        make lock   pin the newest versions        make bench   time the router
# make figures   measure what docs/internals/benchmarks.md and docs/internals/reliability.md show, and write it there (an hour)

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
DOCS   := build/docs-venv
# pip reads the hashes in the lock files; nothing else may come in.
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-input
# The package itself is installed in place, so that a changed file needs no new installation.
INSTALL := $(PIP) --no-deps --no-build-isolation --no-index --editable .
# Scripts name the folder that they were made in; where it was moved or copied they are made anew.
ifneq ($(or $(shell cat $(VENV)/where 2>/dev/null),$(CURDIR)),$(CURDIR))
.PHONY: $(BIN)/python
endif

.PHONY: demo phoenix test test-fast browser-test mutation lint docs lock bench figures clean
.DELETE_ON_ERROR:

demo: $(VENV)/installed
	@$(BIN)/smetric demo

phoenix: $(VENV)/installed
	@$(BIN)/python examples/tracing/look.py

test: $(VENV)/installed-dev
	@$(BIN)/python -m pytest

test-fast: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -n auto -m "not slow"

browser-test: $(VENV)/installed-dev
	@$(BIN)/python -m pytest -m browser

# mutmut comes from the index into a layer of its own above the environment of tests.
mutation: $(VENV)/installed-dev
	@$(BIN)/uv run --quiet --no-project --python $(BIN)/python --with 'mutmut>=3.8' mutmut run $(if $(MUTANTS),'$(MUTANTS)')

lint: $(VENV)/installed-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(DOCS)/installed
	@$(DOCS)/bin/sphinx-build -q -W -b html docs build/site
	@echo "open build/site/index.html"

bench: $(VENV)/installed-dev
	@for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python "$$file" || exit 1; done

figures: $(VENV)/installed-dev
	@$(BIN)/python benchmarks/router.py --targets all --scenarios all --rounds 6 --save docs/figures/router.json
	@$(BIN)/python benchmarks/decision.py --save docs/figures/decision.json
	@$(BIN)/python benchmarks/footprint.py --save docs/figures/footprint.json
	@$(BIN)/python -m tests.faults.report
	@$(BIN)/python -m tests.faults.report --soak

lock:
	@.ci/lock

clean:
	rm -rf $(VENV) build dist mutants .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/installed: $(BIN)/python requirements.lock requirements-build.lock pyproject.toml
	@echo "installing into $(VENV) …"
	@$(PIP) --require-hashes -r requirements.lock -r requirements-build.lock
	@$(INSTALL)
	@touch $@

$(VENV)/installed-dev: $(BIN)/python requirements-dev.lock pyproject.toml
	@echo "installing into $(VENV), with the tools for tests …"
	@$(PIP) --require-hashes -r requirements-dev.lock
	@$(INSTALL)
	@touch $@ $(VENV)/installed

# Sphinx has an environment of its own: nothing that serves or tests needs it.
$(DOCS)/installed: requirements-docs.lock
	@echo "installing Sphinx into $(DOCS) …"
	@rm -rf $(DOCS)
	@"$(PYTHON)" -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-input --require-hashes -r requirements-docs.lock
	@touch $@

$(BIN)/python:
	@command -v "$(PYTHON)" >/dev/null || { \
	  echo "$(PYTHON) not found: install Python 3.11 or newer, or name it: make PYTHON=/path/to/python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "$(PYTHON) is $$("$(PYTHON)" -V 2>&1), but SMetric needs Python 3.11 or newer; name one: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "$(PYTHON) has no venv or no pip: install them (on Debian and Ubuntu: apt install python3-venv python3-pip)" >&2; exit 1; }
	@rm -rf $(VENV)
	@"$(PYTHON)" -m venv $(VENV)
	@echo "$(CURDIR)" > $(VENV)/where
