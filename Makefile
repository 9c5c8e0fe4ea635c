# `make` lists the targets. Everything runs in a virtual environment that make itself sets up.
PYTHON ?= python3
BIN := .venv/bin
# What running needs, and with it what the tests, the checks and the other targets need.
RUN_READY := .venv/.run-ready
READY := .venv/.ready
TOOLS := .venv-tools

# Bytecode is made of what is imported, when it is: pip would make it of everything, which takes longer than unpacking.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install run test test-slow coverage check lint bench docs deploy-demo wheel sbom audit clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(RUN_READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "fedcir needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable .
	@touch $@

$(READY): $(RUN_READY)
	$(BIN)/pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@touch $@

install: $(READY)  ## Set up the virtual environment in .venv, with every extra

run: $(RUN_READY)  ## Train FedAvg, FedCiR, FedCiRPlus and Centralized on the embedded data and compare them (resumes, or shows again)
	$(BIN)/fedcir compare $(if $(wildcard runs/default/*),--resume) --out runs/default

# Three workers on two cores, because tests of processes mostly wait. A worker gets tests that follow each other (worksteal),
# so that the fixtures of a module are mostly made once. One torch thread a worker: more only compete. fedcir sets its own
# number of threads, and one test runs without the variable.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest --dist worksteal

test: $(READY)  ## The fast tests
	$(PYTEST) --numprocesses 3 -m "not slow"

test-slow: $(READY)  ## The slow tests, and the Hypothesis tests with many examples
	$(PYTEST) --numprocesses 3 -m "slow or hypothesis" --hypothesis-profile large

coverage: $(READY)  ## Measure branch coverage of the fast tests and write docs/coverage.md
	$(BIN)/coverage erase
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -m "not slow" -p no:cacheprovider || true
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage json --quiet -o build/coverage.json
	$(BIN)/python docs/coverage.py build/coverage.json

lint: $(READY)  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint test  ## ruff, mypy and the fast tests

bench: $(READY)  ## Measure speed; see benchmarks/
	$(BIN)/python benchmarks/layouts.py
	$(BIN)/python benchmarks/matmul_conv.py
	$(BIN)/python benchmarks/steps.py
	$(BIN)/python benchmarks/norms.py
	$(BIN)/python benchmarks/local_step.py --steps 60
	$(BIN)/python benchmarks/compiled.py
	$(BIN)/python benchmarks/scale.py
	$(BIN)/python benchmarks/simulator.py --json docs/performance.json
	$(BIN)/python benchmarks/flower.py

docs: $(READY)  ## Write the generated tables of the docs anew, and the documentation site into build/site
	$(BIN)/python docs/fields.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

deploy-demo: $(READY)  ## The four sites of minidigits on Flower, with TLS and registered keys, and the same in process
	rm -rf runs/demo-in-process runs/demo-flower
	$(BIN)/fedcir run --rounds 5 --eval-every 5 --out runs/demo-in-process
	$(BIN)/fedcir deploy local --rounds 5 --eval-every 5 --out runs/demo-flower
	@cmp runs/demo-in-process/model.safetensors runs/demo-flower/model.safetensors && echo "the same model, byte for byte"

wheel: $(READY)  ## Build the wheel into dist/
	$(BIN)/python -m build --wheel

# Tools that fedcir does not depend on have an environment of their own.
$(TOOLS)/.ready:
	$(PYTHON) -m venv $(TOOLS)
	$(TOOLS)/bin/pip install --quiet cyclonedx-bom pip-audit
	@touch $@

sbom: $(READY) $(TOOLS)/.ready  ## Write what is installed into dist/sbom.json (CycloneDX)
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment --output-reproducible --short-PURLs --mc-type library --pyproject pyproject.toml -o dist/sbom.json $(BIN)/python

audit: $(READY) $(TOOLS)/.ready  ## Look for known weaknesses in what is installed; needs the network
	@$(BIN)/pip freeze --exclude-editable > $(TOOLS)/installed.txt
	@$(TOOLS)/bin/pip-audit --strict --disable-pip --no-deps --progress-spinner off -r $(TOOLS)/installed.txt || \
		{ echo "a weakness was found, or the database of pip-audit cannot be reached from here: see above" >&2; exit 1; }

clean:  ## Remove the virtual environment and what was built
	rm -rf .venv $(TOOLS) dist build .mypy_cache .ruff_cache .pytest_cache
