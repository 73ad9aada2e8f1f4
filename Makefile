# `make demo` and `make test` are the two commands of the README. Both work on a fresh machine with Python 3.11+.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help demo test test-all check lint tools format bench clean

help:
	@echo "make demo      train a real model elastically and show that it equals DDP's, bit for bit"
	@echo "make test      lint, types and every test but the slow proofs (under 12 minutes on two cores)"
	@echo "make check     what to run before every commit (about a minute)"
	@echo "make test-all  the slow proofs too"
	@echo "make bench     the benchmarks behind docs/results"

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.run-ready: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[cluster,examples]'
	@touch $@

.venv/.dev-ready: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	@touch $@ .venv/.run-ready

demo: .venv/.run-ready
	$(BIN)/python examples/demo.py

lint: .venv/.dev-ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

check: lint
	$(BIN)/pytest tests/unit tests/property -m 'not slow'

# A browser and `ip`, where they are missing and this may install them; elsewhere the tests that need them are skipped.
tools:
	@missing=""; \
	command -v chromium >/dev/null || missing="$$missing chromium"; \
	command -v chromedriver >/dev/null || missing="$$missing chromium-driver"; \
	command -v ip >/dev/null || missing="$$missing iproute2"; \
	if [ -n "$$missing" ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "installing$$missing"; export DEBIAN_FRONTEND=noninteractive; \
	  (apt-get update -qq && apt-get install -qq -y --no-install-recommends $$missing) >/dev/null 2>&1 \
	    || echo "could not install$$missing; the tests that need them will be skipped"; \
	fi

# Two at once: many tests wait for processes more than they compute. A file stays together, with what it has prepared.
# The folders keep their order, bitwise first: what is long comes early, and many short tests are left to fill the end with.
test: lint tools
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow'

test-all: lint tools
	$(BIN)/pytest

format: .venv/.dev-ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/.dev-ready
	$(BIN)/python -m benchmarks

clean:
	rm -rf .venv demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
