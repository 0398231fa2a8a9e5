# make demo   sets up and runs the main job on something real
# make test   sets up, lints, type-checks and runs the tests
# make docs   builds the site of docs/ (strictly: a dead link fails)
# make torture attacks everything, for about an hour (docs/explanation/reliability.md)
# make bench  measures us, our peers and the limits on the same files (bench-quick: under three minutes)

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs torture browser lint bench bench-quick peers package clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m benchmarks.demo

test: .venv/installed lint
	$(BIN)/python -m pytest -q --durations=10 -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

docs: .venv/installed
	$(BIN)/mkdocs build --quiet --strict

torture: .venv/installed
	$(BIN)/python -m tests.faults.torture

# The report is tested in a real Chromium, where there is one (as root, on Debian).
browser:
	command -v chromium && command -v chromedriver || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Peers are measured in an environment of their own: they need more, and other versions, than we do.
.venv-peers/installed: benchmarks/peers/requirements.txt
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet --disable-pip-version-check --no-deps -r benchmarks/peers/requirements.txt
	touch $@

peers: .venv-peers/installed

bench: .venv/installed .venv-peers/installed
	$(BIN)/python -m benchmarks
	$(BIN)/python -m benchmarks.large
	$(BIN)/python -m benchmarks.growth
	$(BIN)/python -m benchmarks.ledger_growth
	$(BIN)/python -m benchmarks.adapters

bench-quick: .venv/installed .venv-peers/installed
	$(BIN)/python -m benchmarks --quick

# What is published: built as an index would have it, and looked over.
package: .venv/installed
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist

clean:
	rm -rf .venv .venv-peers build dist *.egg-info
