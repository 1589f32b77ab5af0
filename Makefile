# One command each. Everything lives in .venv, which is built on first use and again when a dependency changes,
# from the exact versions in constraints.txt. Benchmarks and `make newest` have environments of their own.

PYTHON ?= python3
WORKERS ?= 2
# Extras installed for `make test`, separated by commas.
EXTRAS := dev,torch,flower,report
BENCH_EXTRAS := bench

VENV := .venv
BIN := $(VENV)/bin
# By the environment, since pip holds what builds a package to it as well (older pip by the first, newer by both).
CONSTRAINTS := constraints.txt
HELD := PIP_CONSTRAINT=$(abspath $(CONSTRAINTS)) PIP_BUILD_CONSTRAINT=$(abspath $(CONSTRAINTS))
INSTALL := $(HELD) $(BIN)/python -m pip install -q --disable-pip-version-check
# One BLAS thread a worker: the workers already fill the cores.
PYTEST := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest --dist worksteal -n

.PHONY: help demo demo-parties test test-slow test-anywhere test-core newest mutants format lint types bench docs reproduce clean
.DELETE_ON_ERROR:

help:
	@echo "make demo       train on a budget, with the core dependencies only"
	@echo "make demo-parties  three parties and a coordinator, each in processes of its own"
	@echo "make test       lint, types and the quick tests"
	@echo "make test-slow  the slow tests"
	@echo "make test-anywhere  the quick tests as on older processors, and on a busy machine"
	@echo "make test-core  the quick tests of the command line, with the core dependencies only"
	@echo "make newest     make test with the newest version of everything"
	@echo "make mutants    one-line bugs planted one by one: does a test notice each of them?"
	@echo "make format     rewrite the sources in the house style"
	@echo "make lint       ruff: rules and format"
	@echo "make types      mypy, strict"
	@echo "make bench      side by side with peers"
	@echo "make docs       the documents as a site, into site/"
	@echo "make reproduce NAME=...  a paper's figure and table; without NAME, a list; SMALL=1 in seconds"
	@echo "make clean      remove everything built here"

demo: $(VENV)/.core
	$(BIN)/python -m farthing.cli.demo

demo-parties: $(VENV)/.flower
	$(BIN)/python -m farthing.cli.demo_parties

test: lint types
	$(PYTEST) $(WORKERS) -m "not slow"

# Two workers more: many of these tests wait. FARTHING_EXPLORE=1 makes the longest of them several times as long.
test-slow: $(VENV)/.dev
	$(PYTEST) $$(($(WORKERS) + 2)) -m slow

test-anywhere: $(VENV)/.dev
	BIN=$(abspath $(BIN)) tools/anywhere $(CONDITIONS)

# Built afresh each time: what is newest changes. First the core alone, whose dependencies Flower holds back.
newest:
	rm -rf .venv-newest
	$(MAKE) VENV=.venv-newest CONSTRAINTS=constraints-newest.txt demo test-core
	$(MAKE) VENV=.venv-newest CONSTRAINTS=constraints-newest.txt test

# The command line with the core dependencies only, as `pip install .` brings them.
test-core: $(VENV)/.core
	$(INSTALL) pytest pytest-xdist hypothesis
	$(PYTEST) $(WORKERS) -m "not slow" tests/cli

mutants: $(VENV)/.dev
	$(BIN)/python -m tools.mutants --workers $(WORKERS) $(ONLY)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

build/constraints-bench.txt: constraints.txt constraints-bench.txt
	mkdir -p build
	(grep -v '^scikit-learn==' constraints.txt; cat constraints-bench.txt) > $@

bench: build/constraints-bench.txt
	$(MAKE) VENV=.venv-bench CONSTRAINTS=build/constraints-bench.txt .venv-bench/.bench
	.venv-bench/bin/python -m benchmarks

# What is documented of farthing.torch is read off the code itself, so PyTorch has to be there.
docs: $(VENV)/.docs
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html -d build/docs docs site
	@echo "site/index.html"

# Those that train networks need PyTorch.
reproduce: $(VENV)/$(if $(filter-out adadp-figure-1,$(filter adadp-% %-recipe adapting correlated federated-cifar10 federated-networks,$(NAME))),.torch,.report)
	$(BIN)/python -m experiments $(NAME) $(if $(SMALL),--small)

clean:
	rm -rf .venv .venv-bench .venv-newest build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.core: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(INSTALL) -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core Makefile
	$(INSTALL) -e ".[$(EXTRAS)]"
	@touch $@

$(VENV)/.flower: $(VENV)/.core Makefile
	$(INSTALL) -e ".[flower]"
	@touch $@

$(VENV)/.report: $(VENV)/.core Makefile
	$(INSTALL) -e ".[report]"
	@touch $@

$(VENV)/.torch: $(VENV)/.core Makefile
	$(INSTALL) -e ".[report,torch]"
	@touch $@

$(VENV)/.bench: $(VENV)/.core Makefile
	$(INSTALL) -e ".[$(BENCH_EXTRAS)]"
	@touch $@

$(VENV)/.docs: $(VENV)/.core Makefile
	$(INSTALL) -e ".[docs,torch]"
	@touch $@
