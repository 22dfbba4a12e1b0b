# Every command sets itself up.
#   make test    everything: format, lint, types, tests and doctests
#   make check   the same for what changed since main, within a minute (BASE=... compares with another commit)
#   make figures draw the figures and tables of the papers and of measured accuracy again from their results
#   make docs    build the documentation site into build/site, offline; a warning is an error
#   make device-packages, then make device on a CUDA machine: its tests and benchmarks, results in build/device
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

# What a CUDA machine without network needs beside torch, numpy and scipy, and the Python version there.
DEVICE_PYTHON ?= 3.12
DEVICE_PACKAGES := absl-py attrs cffi cryptography dp-accounting hypothesis iniconfig opacus opt_einsum pluggy \
	pycparser pygments pytest sortedcontainers

.PHONY: test check docs figures demo lint format benchmark device device-packages clean

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

# DEVICE_RESULTS is the folder for the results.
DEVICE_RESULTS ?= build/device
device:
	$(PYTHON) benchmarks/on_device.py $(DEVICE_RESULTS)

device-packages: $(INSTALLED)
	rm -rf build/device-packages && mkdir -p build
	for package in $(DEVICE_PACKAGES); do grep -i "^$$package==" constraints.txt || echo $$package; done \
		> build/device-packages.txt
	$(BIN)/python -m pip install --quiet --no-deps --only-binary :all: --python-version $(DEVICE_PYTHON) \
		--target build/device-packages --requirement build/device-packages.txt

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
