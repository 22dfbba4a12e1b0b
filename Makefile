# Every command sets itself up.
#   make test    everything: format, lint, types, tests and doctests
#   make check   the same for what changed since main, within a minute (BASE=... compares with another commit)
#   make figures draw the figures and tables of the papers and of measured accuracy again from their results
#   make docs    build the documentation site into build/site, offline; a warning is an error
#   make demo    a first federation and its report; installs no development tools
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime
INSTALLED := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# One worker more than cores: tests of federations mostly wait.
WORKERS := $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)

# Keep compiled tests between runs, so that pytest and the processes that tests start begin sooner.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test check docs figures demo lint format benchmark clean

test: lint
	$(BIN)/python -m pytest -n $(WORKERS)
	$(BIN)/mypy

check: $(INSTALLED)
	$(BIN)/python tools/check.py $(BASE)

docs: $(INSTALLED)
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d build/doctrees . build/site
	@echo "open build/site/index.html"

figures: $(INSTALLED)
	for study in pfa fedsel pdp-fl fedhdp cmp-fed; do $(BIN)/polyeps reproduce $$study --show || exit 1; done
	$(BIN)/python -m polyeps_reproductions.page_tables
	$(BIN)/python benchmarks/accuracy_picture.py
	$(BIN)/python benchmarks/speed_tables.py

demo: $(RUNTIME)
	$(BIN)/polyeps demo

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/codespell
	$(BIN)/python tools/prose.py

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/accounting.py

# Reinstall only when requirements change. The development environment contains the runtime environment.
$(RUNTIME): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable .
	touch $@

$(INSTALLED): pyproject.toml reproductions/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) --editable '.[dev]' --editable reproductions
	touch $(RUNTIME) $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
