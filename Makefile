# make install, make demo, make test: on a fresh Debian or Ubuntu with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
IMAGES ?= docker build
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)

.PHONY: help install demo crd images test test-long lint format clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 18

install: $(STAMP) ## Make .venv and install everything, vLLM for CPUs included.

$(STAMP): pyproject.toml scripts/install.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "KubeRoll needs Python 3.11 or newer; name one with make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
		{ echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python scripts/install.py
	@touch $@

demo: install ## Play 256 sliding puzzles with a tiny policy on this machine's CPU.
	$(BIN)/kuberoll run examples/sliding-puzzle/rolloutjob.yaml --output runs/demo-$$(date +%Y%m%d-%H%M%S)

crd: install ## Make from the model: the CRD, the reference of its fields, the chart's schema and tables.
	$(BIN)/kuberoll crd > crds/rolloutjobs.kuberoll.io.yaml
	$(BIN)/kuberoll crd --reference > docs/rolloutjob.md
	$(BIN)/python scripts/chart.py
	$(BIN)/python scripts/dashboards.py
	$(BIN)/python scripts/metrics.py

images: ## Build the three images; IMAGES="podman build" or "buildah bud" where there is no Docker.
	$(IMAGES) --target operator --build-arg REVISION=$(REVISION) -t kuberoll/operator:$(VERSION) .
	$(IMAGES) --target worker --build-arg REVISION=$(REVISION) -t kuberoll/worker:$(VERSION) .
	$(IMAGES) --target serve --build-arg REVISION=$(REVISION) -t kuberoll/generation:$(VERSION) .

test: install lint ## Check and test everything.
	$(BIN)/pytest

test-long: install ## The tests that take a minute or more, too: half an hour and more.
	KUBEROLL_KILLS=100 $(BIN)/pytest --long

lint: install ## Check style, types and the import rules.
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## Format the code.
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format

clean: ## Remove what was installed and cached; runs stay.
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
