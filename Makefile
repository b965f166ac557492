# `make demo` and `make test` need nothing but Python 3.11 or newer, a C compiler and a package index: each builds .venv
# first if it is not there, from the pins in constraints.txt, and starts at once if it is.

PYTHON ?= python3
ARGS   ?=
MODEL_ARGS ?=

BIN   := .venv/bin
DEMO  := .venv/.demo
READY := .venv/.ready
FETCH := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
PIP   := $(FETCH) -c constraints.txt
# What the tests of a file share is made once: a file is not torn between the workers.
TESTS := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=tests/gpu
# Kernels are built under the newest Triton, from constraints.txt, and under the oldest that affinear works with.
OLDEST_TRITON := 3.6.0
OLDEST := .venv/triton-$(OLDEST_TRITON)

# Wheels are installed uncompiled, which halves the set-up; Python then has to be free to keep what it compiles.
unexport PYTHONDONTWRITEBYTECODE
# Two test workers share the cores, and nothing may be fetched while testing.
test test-all: export OMP_NUM_THREADS = 1
test test-all: export HF_HUB_OFFLINE = 1
# The theme otherwise greets every build with a notice about another program's plans.
docs: export NO_MKDOCS_2_WARNING = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-gpu lint format bench bench-gpu docs clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(DEMO) ## train one small network per attention on real digits and compare them (ARGS="--seeds 5")
	$(BIN)/affinear compare $(ARGS)

test: lint $(OLDEST)/.ready ## lint, check types, run every test but the exhaustive ones (ARGS="-k state" picks some)
	$(TESTS) --ignore=tests/fuzz -m "not exhaustive" $(ARGS)

test-all: test ## the same, then the exhaustive tests and the fuzz loops, which print their counts (ARGS="-k images")
	$(TESTS) -m exhaustive $(ARGS)

test-gpu: ## test on a GPU, under the Python that has its torch (ARGS="--report FILE.json")
	PYTHONPATH=src $(PYTHON) scripts/gpu_tests.py $(ARGS)

lint: $(READY) ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

format: $(READY) ## put the code into the house style
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(READY) ## time the operator on this machine beside its rivals
	$(BIN)/python benchmarks/operator_cpu.py $(ARGS)

bench-gpu: ## time operator and networks on a GPU, under the Python that has its torch (ARGS="--only decode")
	PYTHONPATH=src $(PYTHON) -m affinear.cli bench ops $(ARGS)
	PYTHONPATH=src $(PYTHON) -m affinear.cli bench models $(MODEL_ARGS)

docs: $(READY) ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

clean: ## remove the environment and everything built
	rm -rf .venv site dist .pytest_cache .ruff_cache .hypothesis
	find src tests scripts evidence -name __pycache__ -prune -exec rm -rf {} +

# What trains, and nothing else: the demo starts as soon as it can.
$(DEMO): pyproject.toml constraints.txt scripts/cpu_torchvision.py
	@echo "Setting up .venv for the demo: 1.3 GB, a minute or two, once."
	$(PYTHON) -m venv .venv
	$(PIP) hatchling editables
	$(PIP) --no-build-isolation -e ".[train]"
	$(BIN)/python scripts/cpu_torchvision.py
	@touch $@

$(READY): $(DEMO)
	@echo "Setting up the rest of .venv: one or two minutes more, once."
	$(PIP) --no-build-isolation -e ".[vision,export,lens,train,linearizing,language,speech,datasets,dev,docs]"
	$(BIN)/python scripts/cpu_torchvision.py
	@touch $@

$(OLDEST)/.ready: | $(READY)
	rm -rf .venv/triton-*
	$(FETCH) --no-deps --target $(OLDEST) triton==$(OLDEST_TRITON)
	@touch $@
