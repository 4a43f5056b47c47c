# Two commands matter: `make demo` (the whole way on this machine) and `make test` (set-up and all tests).
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# Without bytecode each program that a test or a demo starts would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Slow tests wait more than they compute: more workers than processors. ORDER=random: another order at every call.
WORKERS := $(shell echo $$((2 * $$(nproc) < 8 ? 2 * $$(nproc) : 8)))
GROUPS := --dist=loadscope --no-loadscope-reorder
BESIDE := --numprocesses=$(WORKERS) $(GROUPS)
SHUFFLE := $(if $(filter random,$(ORDER)),--shuffle=$(shell date +%s%N))
# the files of the tests that run alone: the others need not be imported
ALONE = $(shell grep -lr --include=*.py pytest.mark.alone tests)
SHELL_FILES = $(shell git ls-files '*.sh')

.PHONY: help setup demo demo-slurm test test-long test-slurm test-torch check format gpu-check container-env docs drill drill-kills bench release cluster-up cluster-down clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: $(VENV)/.ready ## create .venv/ with everything (torch first; BUILD=cpu or cuda chooses its build)

$(VENV)/.ready: pyproject.toml constraints.txt constraints-hashes.txt scripts/tools/setup.sh
	scripts/tools/setup.sh $(VENV)

demo: setup ## raw text to a trained model on this machine, without Slurm (about 6 minutes)
	$(BIN)/python -m scripts.demo $(DEMO)

demo-slurm: setup slurm ## the same as Slurm jobs, on a four-node Slurm on this machine
	scripts/tools/demo_slurm.sh $(DEMO)

test: setup accounting browser ## set-up and all tests
	status=0; \
	$(PYTEST) $(BESIDE) $(SHUFFLE) -m "not long and not alone" || status=$$?; \
	$(PYTEST) $(SHUFFLE) -m "alone and not long" $(ALONE) || status=$$?; \
	exit $$status

test-long: setup accounting browser ## the tests that take long
	status=0; \
	$(PYTEST) $(BESIDE) $(SHUFFLE) -m "long and not alone" || status=$$?; \
	$(PYTEST) $(SHUFFLE) -m "long and alone" $(ALONE) || status=$$?; \
	make --no-print-directory test-slurm SLURM_VERSION="$(filter-out $(OWN_SLURM),$(SLURM_VERSIONS))" || status=$$?; \
	exit $$status

# Versions that the machine lacks have a root each, built by scripts/tools/slurm_version.sh.
SLURM_VERSIONS := 22.05 24.11 26.05
OWN_SLURM = $(shell PATH="$$PATH:/usr/sbin:/sbin"; slurmctld -V 2>/dev/null | sed -n 's/^slurm[^ ]* \([0-9]*\.[0-9]*\)\..*/\1/p')
SLURM_VERSION := all
SLURM_TESTS := $(addprefix tests/slurm/,test_law_slurm.py test_fallback_slurm.py test_fallback_sites_slurm.py \
  test_spare_nodes_slurm.py test_goodput_slurm.py test_free_text.py test_nodes_apart_slurm.py \
  test_wish_and_fact_slurm.py test_slurms_own_acts_slurm.py test_watched_slurm.py test_container_slurm.py)
test-slurm: setup accounting ## the tests of chains on Slurm 22.05, 24.11 and 26.05; SLURM_VERSION=26.05: on one of them
	if [[ "$${RELAYRUN_NO_SLURM:-}" == 1 ]]; then echo "NOT TESTED on Slurm: RELAYRUN_NO_SLURM=1" >&2; exit 0; fi; \
	status=0; \
	for version in $(if $(filter all,$(SLURM_VERSION)),$(SLURM_VERSIONS),$(SLURM_VERSION)); do \
	  if ! missing="$$(scripts/tools/slurm_version.sh check "$$version" 2>&1)"; then \
	    echo "NOT TESTED on Slurm $$version: $$missing" >&2; \
	    [[ "$(SLURM_VERSION)" != "$$version" ]] || status=1; \
	    continue; \
	  fi; \
	  echo "tests on Slurm $$version" >&2; \
	  scripts/tools/slurm_version.sh run "$$version" env SLURM_VERSION="$$version" $(PYTEST) $(BESIDE) $(SLURM_TESTS) || status=$$?; \
	done; \
	exit $$status

# In an environment of its own, .venv-torch-cuda or .venv-torch-cpu.
TORCH_VENV = .venv-torch-$(BUILD)
TORCH_TESTS := tests/train/test_fork_server.py tests/gpucheck tests/chain/test_local_recovery.py \
  tests/chain/test_local_restarts.py tests/chain/test_local_hangs.py tests/chain/test_node_health.py
test-torch: ## the tests of recovery and of gpu-check with another build of torch: BUILD=cuda or cpu
	@[[ "$(BUILD)" == cuda || "$(BUILD)" == cpu ]] || { echo "error: say which build: make test-torch BUILD=cuda" >&2; exit 2; }
	BUILD=$(BUILD) scripts/tools/setup.sh $(TORCH_VENV)
	$(TORCH_VENV)/bin/python -m pytest $(BESIDE) -m "not long and not alone" $(TORCH_TESTS)

check: setup ## style, types, and the fast tests: shellcheck and shfmt are among these
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PYTEST) -q --numprocesses=$$(nproc) $(GROUPS) -m "not slow and not slurm and not long and not alone"

release: setup ## dist/: sdist, wheel and relayrun.pyz, the same bytes at every build; each is installed, and a chain run from it
	$(BIN)/python scripts/tools/make_release.py dist
	$(PYTEST) -q tests/package/test_release.py tests/package/test_pyz.py tests/package/test_wheel.py

DOCS_VENV := .venv-docs
SITE := site
docs: $(DOCS_VENV)/.ready ## the site of docs/ in site/, with search; look at it by `python3 -m http.server -d site`
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --quiet --site-dir "$(abspath $(SITE))"
	@echo "$(SITE): $$(find "$(SITE)" -name '*.html' | wc -l) pages"

$(DOCS_VENV)/.ready: constraints-docs-hashes.txt
	$$(command -v $(or $(PYTHON),python3.11 python3.12 python3) | head -1) -m venv --clear $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r $<
	touch $@

format: setup ## put the files into the form that `check` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/shfmt -i 2 -ci -w $(SHELL_FILES)

gpu-check: $(if $(PYTHON),,setup) ## what this machine's GPUs do with relayrun, in five minutes; TINY=1: the same way on CPUs
	$(or $(PYTHON),$(BIN)/python) -m relayrun.cli gpu-check $(if $(filter-out 0,$(TINY)),--tiny) $(GPU_CHECK)

container-env: ## inside an image: relayrun's packages beside it; ENV=/shared/folder (docs/how-to/containers.md)
	container/make_env.sh "$(ENV)" $(IMAGE_PYTHON)

drill-kills: setup slurm ## a rank killed every minute, a node lost every ten, for an hour (MINUTES=60), and what it cost
	$(BIN)/python benchmarks/kills.py $(if $(MINUTES),--minutes=$(MINUTES)) $(KILLS)
	for page in report readme; do $(BIN)/python benchmarks/_$$page.py; done

bench: setup ## all benchmarks but the drill of kills; results go to benchmarks/results/ and docs/reference/benchmarks.md
	for script in $(filter-out benchmarks/kills.py,$(wildcard benchmarks/[!_]*.py)); do $(BIN)/python "$$script"; done
	$(BIN)/python benchmarks/_report.py

# Slurm from Debian's packages, for the tests; RELAYRUN_NO_SLURM=1 goes without.
.PHONY: slurm accounting
slurm:
	@if [[ "$${RELAYRUN_NO_SLURM:-}" != 1 ]]; then scripts/tools/install_slurm.sh; fi
accounting: # as well slurmdbd and its database
	@if [[ "$${RELAYRUN_NO_SLURM:-}" != 1 ]]; then scripts/tools/install_slurm.sh --accounting; fi

# Chromium from Debian's packages, for tests of pages; RELAYRUN_NO_BROWSER=1 goes without.
.PHONY: browser
browser:
	@if [[ "$${RELAYRUN_NO_BROWSER:-}" != 1 ]]; then scripts/tools/install_chromium.sh; fi

cluster-up: setup slurm ## a real four-node Slurm on this machine, in .test-cluster/
	scripts/tools/test_cluster.sh up

drill: setup slurm ## faults on purpose, on a four-node Slurm of this machine; FAULTS=rank-killed,... or all
	status=0; \
	scripts/tools/test_cluster.sh up .drill-cluster --node-timeout 30; \
	SLURM_CONF=$(CURDIR)/.drill-cluster/etc/slurm.conf $(BIN)/python -m relayrun.cli drill --cluster test --yes \
	  $(if $(FAULTS),--faults "$(FAULTS)") $(DRILL) || status=$$?; \
	scripts/tools/test_cluster.sh down .drill-cluster; \
	exit $$status

cluster-down: ## stop it
	scripts/tools/test_cluster.sh down

clean: ## remove what make and the demo made
	rm -rf $(VENV) .venv-torch-* $(DOCS_VENV) $(SITE) demo-output .pytest_cache .mypy_cache .ruff_cache .hypothesis
