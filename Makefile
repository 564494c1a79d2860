# `make demo` and `make test` need Linux, Python 3.11 and make; the rest they set up themselves, in .venv and var.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
PIPELINE := $(BIN)/batch-pipeline

.DEFAULT_GOAL := help
.PHONY: help setup demo up down test lint format bench chaos

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup:  ## Install the pinned packages into .venv and make the small model (skipped where nothing changed)
	@if [ -z "$(PYTHON)" ]; then echo "set-up: no python3 here: install Python 3.11" >&2; exit 1; fi
	@$(PYTHON) deploy/setup.py

demo: setup  ## Run the example files through the whole pipeline on the real engine, and verify the results
	@$(PIPELINE) demo

up: setup  ## Start the embedded stack (object store, Dagster) in the background and print its addresses
	@$(PIPELINE) up

down:  ## Stop the embedded stack
	@$(PIPELINE) down

lint: setup  ## Linter, formatter, type checker, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint  ## Everything that `lint` checks, then all tests (they need Chromium: installed here by root on Debian)
	@$(PYTHON) deploy/browser.py
	$(BIN)/pytest

format: setup  ## Format the code
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup  ## Run the benchmarks
	@for file in benchmarks/*.py; do case $$file in */_*) continue;; esac; echo "== $$file"; $(BIN)/python $$file || exit 1; done
	@echo "== benchmarks/ledger"; $(BIN)/python -m benchmarks.ledger && $(BIN)/python -m benchmarks.ledger --scale

chaos: setup  ## Kill every part of the stack two hundred times, and count what comes back (about 15 minutes)
	@$(BIN)/python -m tests.chaos --kills $(or $(KILLS),200) --seed $(or $(SEED),1) --long
