# Everything here runs from a bare clone with Python 3.10 or newer and pip. Override, for example,
# the interpreter with `make test PYTHON=python3.12`, the folder with `VENV=/tmp/venv`.
PYTHON ?= python3
VENV ?= .venv
# More options for pip, for example PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=
# More options for pytest, for example PYTEST_ARGS="-k recipes -x"
PYTEST_ARGS ?=
# Where the environments with vLLM go, a few gigabytes each; a folder elsewhere outlives the clone.
VLLM_ENVS ?= build/vllm-envs

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
DEMO := build/demo

.DEFAULT_GOAL := help
.PHONY: help install demo test vllm-envs test-vllm test-gpu check format bench bench-gpu bench-vllm docs clean distclean
.DELETE_ON_ERROR:

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## Create or update the virtual environment

# The stamp is written last, so that an interrupted installation is repeated.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 10) or sys.exit("Python %d.%d found, 3.10 or newer is needed: set PYTHON=..." % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP) ## Calibrate, evaluate and verify the example model
	@mkdir -p $(DEMO)
	HF_HUB_OFFLINE=1 $(BIN)/mla-quant calibrate examples/tiny_mla/model --recipe nvfp4_mla --data example --dtype float32 --out $(DEMO)/checkpoint --overwrite
	HF_HUB_OFFLINE=1 $(BIN)/mla-quant evaluate $(DEMO)/checkpoint --data example:heldout --num-samples 16 --out $(DEMO)/report --overwrite
	HF_HUB_OFFLINE=1 $(BIN)/mla-quant verify $(DEMO)/checkpoint
	@echo "Checkpoint: $(DEMO)/checkpoint"
	@echo "Report:     $(DEMO)/report/report.html"

# Two workers with one thread each: more threads than cores make torch slower, not faster.
test: $(STAMP) ## Run the tests that need neither a GPU nor vLLM
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not gpu" --ignore=tests/gpu --ignore=tests/vllm $(PYTEST_ARGS) tests

vllm-envs: $(STAMP) ## Create the virtual environments with vLLM, one for each version
	MLA_QUANT_VLLM_ENVS='$(VLLM_ENVS)' $(BIN)/python -m tests.vllm.environments $(PIP_ARGS)

# By groups (tests/vllm/conftest.py), since their tests share what a vLLM computed.
test-vllm: vllm-envs ## Run tests/vllm, with a real vLLM on the CPU
	MLA_QUANT_VLLM_ENVS='$(VLLM_ENVS)' OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadgroup $(PYTEST_ARGS) tests/vllm

test-gpu: ## Run tests/gpu and tests/kernels with $(PYTHON) as it is, without the virtual environment
	PYTHONPATH=. $(PYTHON) -m pytest $(PYTEST_ARGS) tests/gpu tests/kernels

check: $(STAMP) ## Check format, lint, types and import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## Format the code and fix what ruff can fix
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(STAMP) ## Measure what calibration adds to a forward pass, on the CPU
	$(BIN)/python -m benchmarks.calibration_overhead --device cpu

bench-gpu: ## Measure calibration and kernels on CUDA with $(PYTHON) as it is
	PYTHONPATH=. $(PYTHON) -m benchmarks.calibration_overhead --device cuda
	PYTHONPATH=. $(PYTHON) -m benchmarks.attention_kernels
	PYTHONPATH=. $(PYTHON) -m benchmarks.record_kernels

bench-vllm: ## Measure serving in vLLM on CUDA, and walk a new user's path, with $(PYTHON) as it is
	PYTHONPATH=. $(PYTHON) -m benchmarks.vllm_serving
	PYTHONPATH=. $(PYTHON) -m benchmarks.serving_walk

$(DOCS_STAMP): $(STAMP) constraints-docs.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -c constraints-docs.txt -e '.[docs]'
	@touch $@

# What its pages say is checked by `make test`, which needs no mkdocs.
docs: $(DOCS_STAMP) ## Build the manual, docs/*.md, into build/site
	$(BIN)/mkdocs build --strict --quiet
	@echo "Manual: build/site/index.html"

clean: ## Remove what was built and cached, but not the virtual environments
	test ! -d build || find build -mindepth 1 -maxdepth 1 ! -name vllm-envs -exec rm -rf {} +
	rm -rf dist .coverage htmlcov .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -path './$(VENV)' -prune -o -path ./build -prune -o -type d -name __pycache__ -exec rm -rf {} +

distclean: clean ## Remove the virtual environments too
	rm -rf '$(VENV)' build
