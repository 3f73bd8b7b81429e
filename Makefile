# `make up` serves the demo; `make test` runs the tests. Everything they need, they make.
SHELL := /bin/bash
VENV ?= .venv
CONFIG ?= configs/local.yaml
ARGS ?=
BIN := $(VENV)/bin
PURE := not ray and not vllm and not gpu and not slow
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup up check test cases docs format clean

help: ## what there is to make
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: ## the environment: .venv, packages, demo model, what tests need
	@cluster/setup.sh --with-test-packages

up: ## serve CONFIG (configs/local.yaml) with Ray, ask it a question, stay until Ctrl-C; options in ARGS
	@cluster/setup.sh
	@exec $(BIN)/pd-serve up $(CONFIG) $(ARGS)

check: setup ## lint, types, import floors and pure tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict pd_serve
	$(BIN)/lint-imports
	$(BIN)/pytest -q -m "$(PURE)"

test: setup ## every test but those that need a GPU
	$(BIN)/pytest -m "not gpu" $(ARGS)

cases: setup ## the public failure cases at their full length
	PD_SERVE_CASES=full $(BIN)/pytest -m "case and not gpu" $(ARGS)

docs: setup ## write docs/config.md, docs/metrics.md and docs/errors.md from the code
	$(BIN)/pd-serve config-docs --output docs/config.md
	$(BIN)/pd-serve reference-docs docs

format: setup ## let ruff format and mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove the environment and caches of this checkout (the demo model stays)
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache pd_serve.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
