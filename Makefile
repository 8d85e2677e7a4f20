# Two commands do all the set-up on a machine that has python3 (3.11 or newer, with venv) and a package registry.
#
#   make run [RECIPE=01] [PROFILE=smoke]   run recipes: a number, a name, several in quotes, or all
#   make test [ARGS="-k launch"]           linters, structure checks and tests
#   make env NAME=pytorch                  make one recipe environment and its Jupyter kernel
#   make lab NAME=pytorch                  make it, and open the notebooks in JupyterLab
#   make clean                             remove everything that these commands made

PYTHON ?= python3
RECIPE ?= 01
PROFILE ?= smoke
NAME ?= pytorch
ARGS ?=
GALLERY := .venv/bin/gallery
TESTS := .envs/tests/bin

.PHONY: help run test env lab clean runner
.DEFAULT_GOAL := help

help:
	@sed -n 's/^#   //p' Makefile

run: runner
	@$(GALLERY) run $(RECIPE) --profile $(PROFILE) $(ARGS)

# Every step runs even if one before it failed: one run shows all there is to mend.
test: runner
	@$(GALLERY) env tests
	@failed=; \
	step() { echo "== $$*"; "$$@" || failed="$$failed\n  $$*"; }; \
	step $(TESTS)/ruff check --quiet .; \
	step $(TESTS)/ruff format --check --quiet .; \
	step $(TESTS)/mypy; \
	step $(GALLERY) check all; \
	step $(TESTS)/python -m pytest tests $(ARGS); \
	[ -z "$$failed" ] || { printf "make test: failed:$$failed\n" >&2; exit 1; }

env: runner
	@$(GALLERY) env $(NAME)

lab: runner
	@$(GALLERY) env $(NAME)
	@.venv/bin/jupyter lab --notebook-dir notebooks

clean:
	@rm -rf .venv .envs runs .pytest_cache .ruff_cache .mypy_cache
	@echo "removed .venv, .envs, runs and caches"

# Seconds when nothing has changed: the stamp in .venv is compared with the lock.
runner:
	@command -v $(PYTHON) >/dev/null || { \
		echo "gallery: $(PYTHON) is not on PATH: install Python 3.11 or newer, or name it with PYTHON=..." >&2; exit 2; }
	@$(PYTHON) -m helpers.runner.bootstrap
