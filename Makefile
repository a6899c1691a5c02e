# Every target works in .venv, made from $(PYTHON) with the exact versions of constraints.txt.
#   make demo                 a real model learns a real task, in a few minutes
#   make check                what must be green before a commit
#   make test PYTHON=python3.12

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Two workers with one thread each: torch's own threads would fight over the cores.
TESTS  := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false $(BIN)/python -m pytest -n 2 --dist worksteal -q
# Which tests `make test` runs; empty is all of them. `make test SELECT=slow` is what `make check` left out.
SELECT ?=
ARGS   ?=
# Python keeps what it compiles, whatever the shell says: else every process of a test compiles torch and its kin anew.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help setup demo test check format format-check lint floors types fast bench gpu docs soak clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: $(READY)  ## the virtual environment, made or renewed

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "afina needs Python 3.11 or newer, and $(PYTHON) is older or missing. Try: make PYTHON=python3.12 ..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) \
	  || { echo "$(PYTHON) -m venv failed; on Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }
	$(BIN)/python -m pip install --quiet --no-compile --prefer-binary -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(READY)  ## teach SmolLM2-135M to turn requests into JSON calls, then compare before and after
	$(BIN)/python demo/run.py $(ARGS)

test: $(READY)  ## every test (SELECT=slow, dist or gpu: only those)
	$(TESTS) $(if $(SELECT),-m "$(SELECT)") $(ARGS)

check: format-check lint floors types fast  ## format, lint, floors, types, fast tests

format: $(READY)  ## rewrite the source in the one format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format --quiet .

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)  ## ruff and the spelling of what people read
	$(BIN)/ruff check .
	$(BIN)/codespell src tests bench demo docs README.md CHANGELOG.md CONTRIBUTING.md

floors: $(READY)  ## which room may import which
	$(BIN)/lint-imports --no-cache

types: $(READY)  ## pyright: strict on the lower floors and the techniques
	$(BIN)/pyright

fast: $(READY)
	$(TESTS) -m "not slow and not dist and not gpu" $(ARGS)

bench: $(READY)  ## every figure of the README, beside the peers (ARGS=--quick: minutes instead of an hour)
	@set -e; for script in bench/*.py; do \
	  case $$script in \
	    bench/gpu.py) continue;; \
	    bench/llamacpp.py) $(BIN)/python -c 'import llama_cpp' 2>/dev/null \
	      || { echo "== $$script left out: it needs llama-cpp-python"; continue; };; \
	  esac; \
	  echo "== $$script"; $(BIN)/python $$script $(ARGS); done

gpu: $(READY)  ## CPU and GPU agree; says so and ends well where there is no GPU
	$(BIN)/python bench/gpu.py $(ARGS)

docs: $(READY)  ## the site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

soak: $(READY)  ## the whole suite over and over (ROUNDS=10), with 200 killed runs and longer fuzzing each time
	@set -e; export AFINA_KILLS=200 AFINA_FULL_DISKS=60 AFINA_FUZZ=10; for round in $$(seq $${ROUNDS:-10}); do echo "== round $$round"; $(TESTS) $(ARGS); done

clean:  ## what was built, the environment too
	rm -rf $(VENV) site build dist .pytest_cache .ruff_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
