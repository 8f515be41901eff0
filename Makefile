# One word for everything; `make help` lists the words.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-machine test-pure check fmt bench pictures clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

setup: .venv/ready ## make .venv with all that the project needs

# PyTorch first and pinned, or another package pulls its CUDA build. The example weights last and without their
# dependencies: some would pin old versions of ours.
.venv/ready: pyproject.toml constraints.txt examples/requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r examples/requirements.txt
	touch $@

demo: setup ## a node, real models deployed, real requests answered, what was saved
	$(BIN)/python -m examples.demo

serve: setup ## leave a node running with the demo's models
	$(BIN)/python -m examples.demo --serve --port $(PORT) $(if $(DATA),--data $(DATA))

# Two halves at once, each half's output printed when it has ended.
test: setup ## all tests
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-machine test-pure

# These start processes, and look at what is left on the machine: one after the other. What they find depends on who
# runs them. All others only compute.
MACHINE := $(addprefix tests/,benchmarks cli docs examples node replay store system tasks worker)

test-machine: setup
	$(BIN)/python -m pytest $(MACHINE)

test-pure: setup
	$(BIN)/python -m pytest $(addprefix --ignore=,$(MACHINE))

check: setup ## linters, types, imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## format the code
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

# Those that replay a recording need TRACES, the directory in which torpor-alibaba-fc lies (docs/benchmarks.md).
bench: setup ## the benchmarks of the README and docs/benchmarks.md, TRACES=DIR for all of them
	for name in wake density overhead churn tetris "asyfunc --level model" scaling fidelity \
	    $(if $(TRACES),"thousand --traces $(TRACES)" "simulator --traces $(TRACES)"); do \
	    $(BIN)/python -m benchmarks.$$name || exit 1; done

pictures: setup ## draw the pictures of the docs
	$(BIN)/python -m docs.pictures.architecture
	$(BIN)/python -m docs.pictures.top

clean: ## remove the environment and what tools left
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
