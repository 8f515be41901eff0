# One target per task; `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test test-machine test-pure check fmt bench pictures clean

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

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

# Two halves run concurrently; the output of each is printed when it has ended.
test: setup ## all tests
	$(MAKE) --no-print-directory --jobs=2 --keep-going --output-sync=target test-machine test-pure

# These tests start processes and check what remains on the machine, so they run one after another. Their results depend
# on the user who runs them. All others only compute.
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

# Benchmarks that replay a recording need TRACES, the directory that contains torpor-alibaba-fc (docs/benchmarks.md).
bench: setup ## the benchmarks of the README and docs/benchmarks.md, TRACES=DIR for all of them
	for name in wake density overhead churn tetris "asyfunc --level model" scaling fidelity \
	    $(if $(TRACES),"thousand --traces $(TRACES)" "simulator --traces $(TRACES)" "torpor --traces $(TRACES)"); do \
	    $(BIN)/python -m benchmarks.$$name || exit 1; done

pictures: setup ## draw the pictures of the docs
	$(BIN)/python -m docs.pictures.architecture
	$(BIN)/python -m docs.pictures.top

clean: ## remove the environment and the files of tools
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
