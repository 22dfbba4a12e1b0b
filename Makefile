# Two commands, each does all its own set-up: `make test` and `make demo`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: test lint demo format benchmark clean

# What fails soonest comes first.
test: lint
	$(BIN)/python -m pytest
	$(BIN)/mypy

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

demo: $(INSTALLED)
	$(BIN)/polyeps demo

format: $(INSTALLED)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(INSTALLED)
	$(BIN)/python benchmarks/accounting.py

# Installed anew only when what is installed has changed.
$(INSTALLED): pyproject.toml reproductions/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]' --editable reproductions
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist
