# One command each. Everything lives in .venv, which is built on first use and again when a dependency changes.

PYTHON ?= python3
WORKERS ?= 2
# Extras installed for `make test`, separated by commas.
EXTRAS := dev,torch,flower,report
BENCH_EXTRAS := bench

BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt
# One BLAS thread a worker: the workers already fill the cores.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

.PHONY: help demo demo-parties test test-slow format lint types bench docs reproduce clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train on a budget, with the core dependencies only"
	@echo "make demo-parties  three parties and a coordinator, each in processes of its own"
	@echo "make test       lint, types and the quick tests"
	@echo "make test-slow  the slow tests"
	@echo "make format     rewrite the sources in the house style"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy, strict"
	@echo "make bench      side by side with peers"
	@echo "make docs       the documents as a site, into site/"
	@echo "make reproduce NAME=...  a paper's figure and table; without NAME, a list; SMALL=1 in seconds"
	@echo "make clean      remove everything built here"

demo: .venv/.core
	$(BIN)/python -m farthing.demo

demo-parties: .venv/.flower
	$(BIN)/python -m farthing.demo_parties

test: lint types
	$(PYTEST) -m "not slow"

# pytest exits with 5 when no test is marked slow.
test-slow: .venv/.dev
	$(PYTEST) -m slow || test $$? -eq 5

format: .venv/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lint: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.dev
	$(BIN)/mypy

bench: .venv/.bench
	$(BIN)/python -m benchmarks

# What is documented of farthing.torch is read off the code itself, so PyTorch has to be there.
docs: .venv/.docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -d build/docs docs site
	@echo "site/index.html"

reproduce: .venv/.report
	$(BIN)/python -m experiments $(NAME) $(if $(SMALL),--small)

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) -e .
	@touch $@

.venv/.dev: .venv/.core Makefile
	$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

.venv/.flower: .venv/.core Makefile
	$(INSTALL) -e ".[flower]"
	@touch $@

.venv/.report: .venv/.core Makefile
	$(INSTALL) -e ".[report]"
	@touch $@

.venv/.bench: .venv/.core Makefile
	$(INSTALL) -e ".[$(BENCH_EXTRAS)]"
	@touch $@

.venv/.docs: .venv/.core Makefile
	$(INSTALL) -e ".[docs,torch]"
	@touch $@
