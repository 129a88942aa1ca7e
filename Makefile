# make install, make demo, make train, make test: on a fresh Debian or Ubuntu with Python 3.11 or newer.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV_STAMP := $(VENV)/.installed-dev
# What makes the site needs versions of its own.
DOCS_VENV := .venv-docs
DOCS_STAMP := $(DOCS_VENV)/.installed

.DEFAULT_GOAL := help

# Compiled modules save each of the many processes that tests start a second.
export PYTHONDONTWRITEBYTECODE :=

# make images: with docker, podman or buildah; into this registry, by the names that the chart has by default.
BUILDER ?= docker
REGISTRY ?= docker.io
TAG ?= $(VERSION)
# gpu or cpu: what the generation image runs on.
ENGINE ?= gpu
# Base images, and an index, other than the Dockerfile's.
comma := ,
BUILD_ARGUMENTS := $(foreach name,PYTHON_IMAGE GPU_IMAGE PIP_INDEX_URL,$(if $($(name)),--build-arg $(name)=$($(name))))
# Files that only the build sees: a pip.conf, and certificates that it may name as /run/secrets/ca.
PIP_CONF ?=
CA_FILE ?=
SECRETS := $(if $(PIP_CONF),--secret id=pip$(comma)src=$(PIP_CONF)) $(if $(CA_FILE),--secret id=ca$(comma)src=$(CA_FILE))
# Anything else for the builder: --network host, --volume /wheels:/wheels:ro, --platform linux/arm64.
BUILD_FLAGS ?=
BUILD = $(BUILDER) build $(BUILD_FLAGS) $(BUILD_ARGUMENTS) $(SECRETS) \
	--build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION)
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
REVISION := $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)

.PHONY: help install install-dev demo bench train crd images release-images chart release-chart wheel docs release-docs check test test-units test-ray test-processes test-cluster cluster-faults test-long batteries lint types style bytecode format clean

help: ## List the targets.
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

install: $(STAMP) ## Make .venv and install KubeRoll with vLLM for CPUs.

install-dev: $(DEV_STAMP) ## Also install what the tests and the generated files need.

$(STAMP): pyproject.toml scripts/install.py
	$(MAKE_VENV)
	$(BIN)/python scripts/install.py
	@touch $@

$(DEV_STAMP): pyproject.toml scripts/install.py
	$(MAKE_VENV)
	$(BIN)/python scripts/install.py --dev
	@touch $(STAMP) $@

define MAKE_VENV
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "KubeRoll needs Python 3.11 or newer; name one with make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' || \
	{ echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
$(PYTHON) -m venv $(VENV)
endef

demo: install ## Play 256 sliding puzzles with a tiny policy on this machine's CPU.
	$(BIN)/kuberoll run examples/sliding-puzzle/rolloutjob.yaml --output runs/demo-$$(date +%Y%m%d-%H%M%S)

train: install ## Watch a policy learn: a trainer beside a continuous job, on this machine's CPU.
	$(BIN)/python examples/train/watch.py --output runs/train-$$(date +%Y%m%d-%H%M%S)

bench: install-dev ## Measure what the project watches, in some ten minutes; COMPARE=COMMIT: against another commit.
	$(BIN)/python -m benchmarks.run $(if $(COMPARE),--compare $(COMPARE))

crd: install-dev ## Make from the model: the CRD, the reference of its fields, the chart's schema and tables.
	$(BIN)/kuberoll crd > crds/rolloutjobs.kuberoll.io.yaml
	$(BIN)/python -m scripts.reference
	$(BIN)/python -m scripts.chart
	$(BIN)/python -m scripts.dashboards
	$(BIN)/python -m scripts.metrics

images: ## Build the three images with BUILDER=docker (podman, buildah), for ENGINE=gpu (cpu): docs/how-to/images.md.
	$(BUILD) --target operator -t $(REGISTRY)/kuberoll/operator:$(TAG) .
	$(BUILD) --target worker -t $(REGISTRY)/kuberoll/worker:$(TAG) .
	$(BUILD) --target serve --build-arg ENGINE=$(ENGINE) -t $(REGISTRY)/kuberoll/generation:$(TAG) \
		$(if $(filter cpu,$(ENGINE)),-t $(REGISTRY)/kuberoll/generation:$(TAG)-cpu) .

# What was pushed for one architecture becomes one name for both, and is signed by its digest.
release-images: ## Join and sign the images of both architectures in REGISTRY: docker buildx, cosign.
	for name in operator worker generation; do \
		image=$(REGISTRY)/kuberoll/$$name && \
		docker buildx imagetools create --tag $$image:$(TAG) $$image:$(TAG)-amd64 $$image:$(TAG)-arm64 && \
		digest=$$(docker buildx imagetools inspect --format '{{.Manifest.Digest}}' $$image:$(TAG)) && \
		cosign sign --yes --recursive $$image@$$digest || exit 1; \
	done

release-chart: ## Push and sign the package of `make chart` in REGISTRY: helm, cosign.
	digest=$$(helm push dist/kuberoll-$(VERSION).tgz oci://$(REGISTRY)/kuberoll/charts 2>&1 | tee /dev/stderr | sed -n 's/^Digest: //p') && \
		test -n "$$digest" && cosign sign --yes $(REGISTRY)/kuberoll/charts/kuberoll@$$digest

chart: install-dev ## Lint the Helm chart and package it into dist/.
	$(BIN)/python scripts/package_chart.py dist

wheel: install-dev ## Build the wheel and the source distribution into dist/.
	$(BIN)/python -m build --outdir dist

$(DOCS_STAMP): pyproject.toml
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet '.[docs]'
	@touch $@

docs: $(DOCS_STAMP) ## Build the site of docs/ in dist/site; a dead link or a page without a place in mkdocs.yml fails.
	$(DOCS_VENV)/bin/mkdocs build --strict

# The versions of the site are directories of the branch gh-pages, which GitHub Pages serves.
release-docs: docs ## Commit the site as VERSION and as `latest` to the branch gh-pages: git.
	PATH="$(CURDIR)/$(DOCS_VENV)/bin:$$PATH"; mike deploy --update-aliases $(VERSION) latest && mike set-default latest

# Two processes more than there are cores, since many tests wait; those that start the same heavy parts stay in one of them
# (tests/conftest.py).
PARALLEL := --numprocesses $(shell expr $$(getconf _NPROCESSORS_ONLN) + 2) --dist loadgroup --no-loadscope-reorder
QUICK := $(PARALLEL) --quick
# Where tests start real processes, engines and containers: tests/second_chance.py.
WHOLE := $(PARALLEL) --second-chance --durations 10

check: install-dev lint ## Check style, types and imports, and run the quick tests: some 80 seconds on two cores.
	$(BIN)/pytest $(QUICK)

test: install-dev ## Check and test everything but the long tests and those of the generation image.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types style bytecode
	$(BIN)/pytest $(WHOLE)

# In a new checkout each process of the tests would compile all that they import for itself. What cannot be imported, the
# tests' own run tells.
bytecode: install-dev
	@echo $(BIN)/pytest --collect-only
	@$(BIN)/pytest --collect-only --quiet >/dev/null 2>&1 || true

# `make test` in parts, for machines side by side: each test is in one of these. Each has a machine of its own, and the
# last builds the generation image, whose build and tests take a quarter of an hour.
test-units: install-dev lint ## Check style, types and imports, and run all tests that start nothing large.
	$(BIN)/pytest $(WHOLE) -m "not (browser or cluster or engine or images or processes or ray)"

test-ray: install-dev ## Run the tests that start Ray or vLLM.
	$(BIN)/pytest $(WHOLE) -m "(engine or ray) and not (cluster or images)"

test-processes: install-dev ## Run the tests that start processes of KubeRoll, Prometheus or Chromium.
	$(BIN)/pytest $(WHOLE) -m "(browser or processes) and not (cluster or engine or images or ray)"

test-cluster: install-dev ## Run the tests that need an API server or containers, those of the generation image too.
	$(BIN)/pytest $(WHOLE) --engine-image -m "cluster or images"

cluster-faults: install-dev ## Break the nodes, engines and workers of a real cluster: tests/faults/cluster.py says what it needs.
	$(BIN)/pytest --numprocesses 0 --capture no tests/faults

test-long: install-dev ## The tests that take a minute or more, too: half an hour and more.
	KUBEROLL_KILLS=100 $(BIN)/pytest $(PARALLEL) --long --engine-image

batteries: install-dev ## Delete each battery in a copy, and run the quick tests of what is left: more than an hour.
	$(BIN)/python scripts/batteries.py

# Side by side: mypy takes as long as all else and uses one core.
lint: install-dev ## Check style, types, the import rules and the workflows of GitHub.
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target types style

types: install-dev
	$(BIN)/mypy

style: install-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports
	$(BIN)/python scripts/sizes.py
	$(BIN)/python scripts/batteries.py --imports
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(BIN)/zizmor --offline --quiet --no-progress .github

format: install-dev ## Format the code.
	$(BIN)/ruff check --fix --quiet
	$(BIN)/ruff format

clean: ## Remove what was installed and cached; runs stay.
	rm -rf $(VENV) $(DOCS_VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist
