# One target per task; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-slow test-machine test-systems test-processes test-scheduling test-nodes test-others test-oldest test-in-oldest check fmt bench pictures clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/ready ## create .venv with everything that the project needs

# PyTorch is installed first and pinned, because another package would install its CUDA build. The example weights are
# installed last and without their dependencies, some of which would pin old versions of ours.
.venv/ready: pyproject.toml constraints.txt examples/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r examples/requirements.txt
	touch $@

demo: setup ## start a node, deploy real models, compare their answers, print the saved memory
	$(BIN)/python -m examples.demo

serve: setup ## run a node with the demo's models
	$(BIN)/python -m examples.demo --serve --port $(PORT) $(if $(DATA),--data $(DATA))

# Three parts run at once, because the first two and test-nodes often wait, and the longest start first. The output of
# each is printed when it has ended.
PARTS := --no-print-directory --jobs=3 --keep-going --output-sync=target
ALL_PARTS := test-systems test-processes test-scheduling test-others test-nodes
PYTEST = $(BIN)/python -m pytest -m '$(if $(SLOW),slow,not slow)'

test: setup ## all tests but the slow ones
	$(MAKE) $(PARTS) $(ALL_PARTS)

test-slow: setup ## the slow tests
	$(MAKE) $(PARTS) $(ALL_PARTS) SLOW=1

# The results of these tests depend on the user who runs them, because they start processes. Most others only compute.
test-machine: setup
	$(MAKE) $(PARTS) test-systems test-processes test-nodes

# The oldest supported PyTorch, in an environment of its own. Only where pip finds a CPU build of it, because the build
# with CUDA is a download of gigabytes.
OLDEST := 2.11.0+cpu
OLDEST_BIN := .venv-oldest/bin

test-oldest: setup ## some tests with the oldest supported PyTorch, where pip finds a CPU build of it
	@if why=$$($(BIN)/python -m pip install --quiet --dry-run --no-deps 'torch==$(OLDEST)' 2>&1); \
	then $(MAKE) --no-print-directory test-in-oldest; \
	else echo "skipped, because pip does not install torch==$(OLDEST): $$(echo "$$why" | tail -1)"; fi

test-in-oldest:
	$(PYTHON) -m venv .venv-oldest
	sed 's/^torch==.*/torch==$(OLDEST)/' constraints.txt > .venv-oldest/constraints.txt
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt torch
	$(OLDEST_BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[demo,dev]'
	$(OLDEST_BIN)/python -m pytest -m 'not slow' tests/model tests/store tests/worker

NODES := tests/node
SYSTEMS := tests/system
SCHEDULING := tests/scheduler tests/simulation
PROCESSES := $(addprefix tests/,benchmarks cli docs examples profiling replay store tasks test_bootstrap.py worker)

test-nodes: setup
	$(PYTEST) $(NODES)

test-systems: setup
	$(PYTEST) $(SYSTEMS)

test-processes: setup
	$(PYTEST) $(PROCESSES)

test-scheduling: setup
	$(PYTEST) $(SCHEDULING)

test-others: setup
	$(PYTEST) $(addprefix --ignore=,$(NODES) $(SYSTEMS) $(SCHEDULING) $(PROCESSES))

check: setup ## linters, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Benchmarks that replay a recording need TRACES, the directory that contains torpor-alibaba-fc (docs/benchmarks.md).
bench: setup ## most benchmarks of docs/benchmarks.md, with TRACES=DIR also those that replay a recording
	for name in wake density overhead churn tetris "asyfunc --level model" scaling fidelity \
	    $(if $(TRACES),"thousand --traces $(TRACES)" "simulator --traces $(TRACES)" "torpor --traces $(TRACES)"); do \
	    $(BIN)/python -m benchmarks.$$name || exit 1; done

pictures: setup ## draw the pictures of the docs
	$(BIN)/python -m docs.pictures.architecture
	$(BIN)/python -m docs.pictures.top

clean: ## remove the environment and the files of tools
	rm -rf .venv .venv-oldest .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
