# Every target runs from .venv, which is made once and brought up to date when
# pyproject.toml or constraints.txt change. PYTHON=/path/to/python chooses the interpreter.

VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
PIP := $(RUN) -m pip --disable-pip-version-check -qq install --constraint constraints.txt

# The peers that ours is compared with have an environment of their own: DeepSpeed brings much.
# SETS="pipelines data" chooses some of the comparisons.
BENCH := .venv-bench

INTERPRETERS := $(or $(PYTHON),python3.11 python3)
USABLE := import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))

# Packages from outside must neither hide nor stand in for the environment's own.
unexport PYTHONHOME PYTHONPATH

.DEFAULT_GOAL := help
.PHONY: help env demo test slow thorough browser lint docs bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' Makefile

env: $(STAMP) ## make the environment .venv, or bring it up to date

demo: $(STAMP) ## run the demonstration
	@$(RUN) -m piper demo

test: lint ## lint, then run the tests
	$(RUN) -m pytest --numprocesses auto --dist worksteal

slow: $(STAMP) ## run the tests marked slow, for half an hour
	$(RUN) -m pytest -m "slow and not thorough" --numprocesses auto --dist worksteal

thorough: $(STAMP) ## run the cases of tests that are in neither, for hours
	$(RUN) -m pytest -m thorough --numprocesses auto --dist worksteal

browser: ## install Chromium with apt, for the tests of the pages (skipped without it)
	@if command -v chromium >/dev/null; then \
		echo "chromium is there"; \
	elif command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ]; then \
		echo "installing chromium"; \
		DEBIAN_FRONTEND=noninteractive apt-get -qq update >/dev/null && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends --yes \
			chromium fonts-liberation >/dev/null; \
	else \
		echo "install chromium by hand: the tests of the pages are skipped without it"; \
	fi

lint: $(STAMP) ## check style, formatting and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

docs: $(STAMP) ## build the documentation into site/, to be read without a network
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "site/index.html"

bench: $(BENCH)/.installed ## ours beside its peers, for hours (ROUNDS=2: less): tables, JSON and a picture in bench-results/
	@$(BENCH)/bin/python bench/compare.py $(SETS) $(if $(ROUNDS),--rounds $(ROUNDS))

clean: ## remove the environments, caches and build outputs
	rm -rf $(VENV) $(BENCH) bench-results .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist site *.egg-info
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is removed before anything changes and written last. An environment without one was
# left half-way and is made afresh; one with an old stamp is whole and is updated in place.
# The project's own build uses the environment's setuptools, so nothing is resolved outside the
# constraints.
$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	if [ -e $@ ] && $(RUN) -c '' 2>/dev/null; then \
		echo "updating the environment in $(VENV)"; \
		rm -f $@; \
	else \
		for python in $(INTERPRETERS) ''; do \
			if [ -n "$$python" ] && "$$python" -c '$(USABLE)' 2>/dev/null; then break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "Piper needs Python 3.11 or newer with its venv module; tried: $(INTERPRETERS)." >&2; \
			echo "Install one, or name it: make PYTHON=/path/to/python3.11 $(or $(MAKECMDGOALS),env)" >&2; \
			exit 1; \
		fi; \
		echo "installing the environment into $(VENV) (once)"; \
		rm -f $@; \
		"$$python" -m venv --clear $(VENV); \
	fi; \
	echo "  build tools"; $(PIP) setuptools; \
	echo "  torch, which is large"; $(PIP) torch; \
	echo "  piper and about 90 other packages: a few minutes"; $(PIP) --no-build-isolation --editable '.[dev]'; \
	touch $@; \
	echo "  done"

$(BENCH)/.installed: $(STAMP)
	@echo "installing the environment of the comparisons into $(BENCH) (once)"
	@$(RUN) -m venv --clear $(BENCH)
	@$(BENCH)/bin/python $(subst $(RUN),,$(PIP)) setuptools torch
	@$(BENCH)/bin/python $(subst $(RUN),,$(PIP)) --no-build-isolation --editable '.[bench]'
	@touch $@
