# make demo      set up, then run the main job on a real model
# make test      set up, lint, type-check and run the tests (with coverage where CI is set)
# make docs      build the site of docs/; a dead link fails
# make torture   inject faults and bad files for about an hour (docs/explanation/reliability.md)
# make mutation  change the code in 300 places and count how many changes the tests notice, for under an hour
# make bench     measure mergestream, its peers and the I/O limit on the same files (bench-quick: under three minutes)

PYTHON ?= python3
BIN := .venv/bin
COVERAGE := $(if $(CI),--cov=mergestream --cov-report=term:skip-covered)

.PHONY: demo test docs torture mutation browser lint bench bench-quick peers package clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m benchmarks.demo

test: .venv/installed lint
	$(BIN)/python -m pytest -q --durations=10 -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder $(COVERAGE)

docs: .venv/installed
	$(BIN)/mkdocs build --quiet --strict

torture: .venv/installed
	$(BIN)/python -m tests.faults.torture

mutation: .venv/installed
	$(BIN)/python -m benchmarks.mutation --map
	$(BIN)/python -m benchmarks.mutation

# Debian, as root: the report is tested in a real Chromium. Without one, those tests are skipped.
browser:
	command -v chromium && command -v chromedriver || ! command -v apt-get || (apt-get update -qq && apt-get install -y -qq chromium chromium-driver)

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Peers have an environment of their own, because they need other versions of our dependencies.
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

# Build the distribution and check it.
package: .venv/installed
	rm -rf dist build
	$(BIN)/python -m build --outdir dist . > /dev/null
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist

clean:
	rm -rf .venv .venv-peers build dist *.egg-info
