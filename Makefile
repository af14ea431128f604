# `make help` lists the targets. Everything that runs sets itself up first.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
# The CPU build where pip finds it (a find-links folder, the CPU index); see README for others.
# The stamp says which torch is there: unless another one is named, it stays.
INSTALLED := $(or $(shell cat $(STAMP) 2>/dev/null),torch==2.13.0)
TORCH_SPEC ?= $(INSTALLED)
TRACE ?=
TOKENIZER ?=
ARGS ?=
OUT ?= outputs/gpu
JOBS ?= 2
KERNELS_VENV ?= .venv-kernels
ENGINES_VENV := .venv-engines
SERVE_VENV := .venv-serve
DOCS_VENV := .venv-docs
SHARED ?= $(or $(TANDEM_SHARED),../shared)

# Bytecode that is not kept would be made anew at every start: 5 s for torch and transformers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-ci test-all kernels serve check engines bench claims docs notebook gpu gpu-site clean compiled another-torch

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make the virtual environment (the other targets do it when needed)

$(STAMP): pyproject.toml constraints.txt .ci/setup
	@VENV=$(VENV) TORCH_SPEC='$(TORCH_SPEC)' .ci/setup
	@echo '$(TORCH_SPEC)' > $@

ifneq "$(TORCH_SPEC)" "$(INSTALLED)"
$(STAMP): another-torch
endif

demo: $(STAMP) ## one trace, simulated and measured on this CPU, compared (TRACE=sharegpt.json for yours)
	@$(BIN)/python -m tandem.demo $(if $(TRACE),--trace '$(TRACE)') \
		$(if $(TOKENIZER),--tokenizer '$(TOKENIZER)') $(ARGS)

test: $(STAMP) ## the fast tests
	@$(BIN)/python -m pytest -m 'not ci and not slow and not gpu' -n $(JOBS) --dist worksteal $(ARGS)

test-ci: $(STAMP) ## those that CI runs beside the fast tests
	@$(BIN)/python -m pytest -m 'ci and not slow and not gpu' -n $(JOBS) --dist worksteal $(ARGS)

test-all: $(STAMP) ## the slow tests too
	@$(BIN)/python -m pytest -m 'not gpu' -n $(JOBS) --dist worksteal $(ARGS)

kernels: $(KERNELS_VENV)/.ready ## the Triton kernels on Triton's interpreter, without a GPU
	@TRITON_INTERPRET=1 $(KERNELS_VENV)/bin/python -m pytest tests/kernels -n $(JOBS) $(ARGS)

# Its own triton, and a numpy that triton's interpreter can do with; all else is $(VENV)'s.
$(KERNELS_VENV)/.ready: $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip $(KERNELS_VENV)
	@$(BIN)/python -m pip --python $(KERNELS_VENV)/bin/python install -qq --no-compile \
		--disable-pip-version-check 'triton==3.6.0' 'numpy<2.4'
	@own=$$($(KERNELS_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
		&& $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$own/tandem.pth
	@touch $@

serve: $(SERVE_VENV)/.ready ## a trace against transformers' own server, which it starts and ends
	@$(BIN)/python -m pytest tests/runtime/test_openai_real.py $(ARGS)

# What `transformers serve` needs beside transformers (the extra `serve`); all else is $(VENV)'s.
$(SERVE_VENV)/.ready: $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip $(SERVE_VENV)
	@$(BIN)/python -m pip --python $(SERVE_VENV)/bin/python install -qq --no-compile \
		--disable-pip-version-check fastapi uvicorn 'openai>=1.98' 'pydantic>=2' rich
	@own=$$($(SERVE_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
		&& $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$own/tandem.pth
	@touch $@

check: $(STAMP) ## format, lint and types
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary
	@echo "check: format, lint and types are clean"

# Ray and submitit, which the sweep's claim tries; without a registry it says that it did not. As
# bytecode, unlike elsewhere: Ray gives each of its processes a quarter of a minute to import itself.
$(ENGINES_VENV)/.ready: $(STAMP)
	@$(BIN)/python -m venv --clear --without-pip $(ENGINES_VENV)
	@$(BIN)/python -m pip --python $(ENGINES_VENV)/bin/python install -qq --compile \
		--disable-pip-version-check 'ray>=2.40' 'submitit>=1.5'
	@own=$$($(ENGINES_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
		&& $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$own/tandem.pth
	@touch $@

engines: $(STAMP)
	@$(MAKE) --no-print-directory $(ENGINES_VENV)/.ready \
		|| echo "Ray and submitit could not be installed: the sweep's claim will say so" >&2

compiled: $(STAMP) ## the hot path as C extensions in build/compiled (mypyc; needs a C compiler)
	@$(BIN)/python -m tandem.compiled

bench: engines ## every claim in its quick form, shown in full, nothing written
	@$(BIN)/python -m benchmarks.claims --quick --dry-run $(ARGS)

claims: engines ## every claim in full; writes benchmarks/CLAIMS.md and CLAIMS.csv
	@$(BIN)/python -m benchmarks.claims $(ARGS)

docs: $(DOCS_VENV)/.ready ## the documents as a site in build/site; a warning is an error
	@PATH=$(abspath $(BIN)):$$PATH NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --quiet --strict --site-dir build/site
	@echo "docs: build/site/index.html"

notebook: $(DOCS_VENV)/.ready ## run the notebook of the documents, and keep what it shows
	@cd docs/notebooks && PYTHONPATH=$(CURDIR) $(abspath $(DOCS_VENV))/bin/jupyter-execute --inplace own-policy.ipynb

# What the extra `docs` names; the notebook also needs what is in $(VENV).
$(DOCS_VENV)/.ready: $(STAMP) pyproject.toml constraints.txt
	@$(BIN)/python -m venv --clear --without-pip $(DOCS_VENV)
	@$(BIN)/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
		> $(DOCS_VENV)/wanted.txt
	@$(BIN)/python -m pip --python $(DOCS_VENV)/bin/python install -qq --no-compile \
		--disable-pip-version-check -c constraints.txt -r $(DOCS_VENV)/wanted.txt
	@own=$$($(DOCS_VENV)/bin/python -c 'import site; print(site.getsitepackages()[0])') \
		&& $(BIN)/python -c 'import site; print(site.getsitepackages()[0])' > $$own/tandem.pth
	@touch $@

gpu-site: .gpu-site/.ready ## what a GPU machine without network lacks: pure wheels, 200 requests

.gpu-site/.ready: $(STAMP) constraints.txt
	@rm -rf .gpu-site && $(BIN)/python -m pip install --quiet --no-compile --no-deps \
		--target .gpu-site -c constraints.txt simpy hydra-core omegaconf antlr4-python3-runtime \
		pytest pytest-timeout pluggy iniconfig pygments packaging
	@if [ -d "$(SHARED)/data/sharegpt" ]; then $(BIN)/tandem trace import \
		$(SHARED)/data/sharegpt/sharegpt_v3_sample_dev.json.gz --limit 200 \
		--tokenizer $(SHARED)/data/tokenizers/llama3 --out .gpu-site/sharegpt.parquet; fi
	@touch $@ && du -sh .gpu-site

gpu: ## on a GPU machine, from a bare checkout, into $$OUT (ARGS=fidelity: one part; ARGS=--dry-run: on a CPU)
	@PYTHONPATH=.gpu-site:. OUT='$(OUT)' $${PYTHON:-python3} -m benchmarks.gpu_parts $(ARGS)

clean: ## remove the environment, caches and results
	rm -rf $(VENV) $(KERNELS_VENV) $(ENGINES_VENV) $(SERVE_VENV) $(DOCS_VENV) .gpu-site .pytest_cache .mypy_cache .ruff_cache .hypothesis outputs multirun
	rm -rf *.egg-info build dist && find . -name __pycache__ -type d -prune -exec rm -rf {} +
