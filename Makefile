# What a person does often. `make demo` and `make test` need nothing but this file's own installs.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SEED ?= 1
EXTRA ?= cpu

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.uv/bin/uv:
	$(PYTHON) -m venv .uv
	.uv/bin/pip install --quiet uv

$(VENV)/.installed: requirements/$(EXTRA).txt pyproject.toml | .uv/bin/uv
	@PYTHON=$(PYTHON) bash scripts/debian_packages.sh
	[ -x $(BIN)/python ] || .uv/bin/uv venv --quiet --python $(PYTHON) $(VENV)
	VIRTUAL_ENV=$(abspath $(VENV)) .uv/bin/uv pip sync --quiet --compile-bytecode --require-hashes requirements/$(EXTRA).txt
	VIRTUAL_ENV=$(abspath $(VENV)) .uv/bin/uv pip install --quiet --no-deps -e .
	touch $@

env: $(VENV)/.installed ## make the environment (EXTRA=cpu or gpu)

demo: env ## train a tiny model with PPO on this machine (SEED=1)
	$(BIN)/linckia train examples/first_run.yaml run.seed=$(SEED) --fresh

lint: env ## format check, lint, import rules, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

test: lint ## lint, types and the tests; those that strike live runs are make faults
	$(BIN)/pytest -q tests/unit tests/local

unit: env ## the pure tests alone
	$(BIN)/pytest -q tests/unit

faults: env ## strike live runs with every fault, write docs/faults.md; what passed on this commit is not run again
	@commit=$$(git rev-parse HEAD); mkdir -p build/faults/$$commit; \
	for file in tests/faults/test_*.py; do \
	  mark=build/faults/$$commit/$$(basename $$file); \
	  [ -e $$mark ] || { $(BIN)/pytest -q $$file && touch $$mark; }; \
	done
	$(BIN)/python scripts/faults_table.py

kube-parts: env ## build Kubernetes, KubeRay, helm and images for a cluster on this machine, once (root, Go)
	bash scripts/kube_packages.sh
	PYTHONPATH=tests $(BIN)/python -m kube.harness.build

kube-up: kube-parts ## a Kubernetes with KubeRay on this machine, in network namespaces of its own
	PYTHONPATH=tests $(BIN)/python -m kube.harness.person up

kube-down: ## take it down again
	PYTHONPATH=tests $(BIN)/python -m kube.harness.person down

test-kube: kube-parts ## the tests on a real Kubernetes
	$(BIN)/pytest -q tests/kube

bench: env ## every benchmark, one JSON each in build/benchmarks
	mkdir -p build/benchmarks
	for script in dispatch weight_sync saving step false_alarms; do \
	  $(BIN)/python benchmarks/$$script.py | tee build/benchmarks/$$script.json; \
	done

docs: env ## write docs/configuration.md again from the config's own descriptions
	$(BIN)/python scripts/config_reference.py

format: env ## rewrite the code in the house format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lock: | .uv/bin/uv ## resolve again and write requirements/*.txt (hashes, no addresses)
	.uv/bin/uv lock --quiet --upgrade
	.uv/bin/uv export --quiet --frozen --extra cpu --extra dev --extra operator --no-emit-project -o requirements/cpu.txt
	.uv/bin/uv export --quiet --frozen --extra gpu --extra dev --extra operator --no-emit-project -o requirements/gpu.txt
	.uv/bin/uv export --quiet --frozen --extra operator --no-emit-project -o requirements/operator.txt

clean: ## remove the environment and local runs
	rm -rf $(VENV) .uv runs models

.PHONY: help env demo lint test unit bench docs format lock faults clean kube-parts kube-up kube-down test-kube
