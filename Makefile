# make demo   sets up and runs the main job on something real
# make test   sets up, lints, type-checks and runs the tests

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test lint bench bench-quick wheel clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m mergestream.evaluation.demo

test: .venv/installed lint
	$(BIN)/python -m pytest -q --durations=10

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

wheel: .venv/installed
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv-peers build dist *.egg-info
