PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
NATIVE := CMakeLists.txt $(shell find csrc 2>/dev/null)

.PHONY: setup check test demo format clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("sketchoptim needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

check: setup
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy --strict src

test: check
	$(BIN)/pytest

demo: setup
	$(BIN)/sketchoptim demo

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) build dist .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
