# PYTHON picks the interpreter that .venv is made from (3.11 to 3.13); ARGS is passed on, e.g. make test ARGS="-k refit".
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
# One thread is faster than two for models as small as those of the demo and the tests.
OMP_NUM_THREADS ?= 1
# Each has engines of its own, about 4 GB.
TEST_PROCESSES ?= 2
# The set-up leaves compiling modules to their first import, so Python must be allowed to keep the result.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev demo demo-nemo-rl quick test test-long test-megatron-0.19 test-vllm-matrix test-nemo-rl test-slurm
.PHONY: test-nemo-rl-trainer test-browser test-fake-gpu test-gpu test-gpu-engine test-loggers test-nixl
.PHONY: test-transformer-engine
.PHONY: lint format types clean

help:  ## show this list
	@grep -hE '^[a-z0-9.-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | awk -F ':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

setup:  ## create or refresh .venv with what a run needs (quick when nothing changed)
	@$(PYTHON) tools/setup_env.py

setup-dev:  ## the same, with what tests, linter and type checker need
	@$(PYTHON) tools/setup_env.py dev

demo test: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)

demo: setup  ## run the CPU demo
	@$(BIN)/nemo-fp8rl demo $(ARGS)

demo-nemo-rl: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
demo-nemo-rl: nemo-rl-checkout .venv/nemo-rl/installed  ## run NeMo RL's own loop on the tiny model; NEMO_RL_SRC names its checkout
	@PYTHONPATH=$(CURDIR)/.venv/nemo-rl $(BIN)/nemo-fp8rl demo --loop nemo $(ARGS)

.PHONY: nemo-rl-checkout
nemo-rl-checkout:
	@test -n "$(NEMO_RL_SRC)" || { echo "NEMO_RL_SRC is not set, so this gets NeMo RL and runs the demo: git clone --depth 1" \
	  "--branch v0.7.0 https://github.com/NVIDIA-NeMo/RL ../nemo-rl && make demo-nemo-rl NEMO_RL_SRC=../nemo-rl" >&2; exit 2; }

test: setup-dev  ## run the tests
	@$(BIN)/python -m pytest -q --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder $(ARGS)
	@$(if $(ARGS),,$(MAKE) --no-print-directory test-gpu-engine)

# Units of every room that need neither an engine nor a trainer, and one tiny run.
QUICK := tests/test_imports.py tests/test_docs.py tests/test_batch.py tests/common/test_secret_variables.py \
  tests/config tests/algorithms/test_advantages.py tests/algorithms/test_gates.py tests/algorithms/test_loss_config.py \
  tests/fp8/test_layers.py tests/fp8/test_linear.py tests/fp8/test_quantize.py tests/hf/test_fp8_layers.py \
  tests/data/test_dataset.py tests/data/test_order.py tests/data/test_split.py tests/run/test_directory.py \
  tests/refit/test_manifest.py tests/refit/test_route_plan.py tests/refit/receiver tests/policy/weights/test_layout.py \
  tests/nemo_rl/recipe/test_precision.py tests/commands/doctor/test_memory.py tests/commands/report/test_scale.py \
  tests/commands/launch/test_settings.py tests/test_train.py::test_every_step_of_fp8_e2e_trains_and_is_aligned

quick: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
quick: setup-dev  ## units of every room and one tiny run, in under two minutes
	@$(BIN)/python -m pytest -q --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder $(QUICK) $(ARGS)

test-gpu-engine: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-gpu-engine: setup-dev  ## the engine's methods for GPUs, on Triton's interpreter; `make test` runs it, too
	@$(BIN)/python -m pytest -q --numprocesses=$(TEST_PROCESSES) --dist=loadfile --no-loadscope-reorder -p tests.gpu_engine.plugin \
	  tests/gpu_engine $(ARGS)
	@$(if $(ARGS),,$(MAKE) --no-print-directory .venv/transformer-engine-2.20/installed || echo \
	  "Transformer Engine's Python cannot be installed: tests/transformer_engine/test_aligned.py is left out" >&2)
	@$(if $(ARGS),,test ! -f .venv/transformer-engine-2.20/installed || \
	  PYTHONPATH=$(CURDIR)/.venv/transformer-engine-2.20 $(BIN)/python -m pytest -q -p tests.transformer_engine.plugin \
	  -m transformer_engine tests/transformer_engine/test_aligned.py tests/transformer_engine/test_formats.py -k "formats or qwen3 and not qwen3_moe and not stands")

test-gpu:  ## the tests that need a GPU, in the environment of PYTHON, which has the packages for one
	@$(PYTHON) -m pytest -q -rs -m gpu $(ARGS)
	@$(if $(ARGS),,VLLM_BATCH_INVARIANT=1 $(PYTHON) -m pytest -q -rs -m gpu -k fresh_engine tests/generation/test_gpu.py)

test-fake-gpu: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-fake-gpu: .venv/transformer-engine-2.20/installed  ## policy and refit of `make test-gpu`, and runs, on a fake device
	@PYTHONPATH=$(CURDIR)/.venv/transformer-engine-2.20 $(BIN)/python -m pytest -q -rs --numprocesses=$(TEST_PROCESSES) \
	  --dist=loadfile --no-loadscope-reorder -p tests.fake_cuda.plugin -m gpu tests/policy tests/refit tests/fake_cuda $(ARGS)

test-long: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-long: setup-dev  ## the tests that `make test` leaves out for their length
	@$(BIN)/python -m pytest -q -m long $(ARGS)
	@$(if $(ARGS),,$(BIN)/python -m pytest -q -m long -p tests.gpu_engine.plugin tests/gpu_engine)

test-megatron-0.19: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-megatron-0.19: setup-dev  ## the policy's tests and the loop's with Megatron Core 0.19, beside the 0.16 of the lock
	@$(BIN)/python -m pip install -q --no-deps --upgrade --ignore-requires-python --python-version 3.12 --only-binary :all: \
	  --target .venv/megatron-0.19 megatron-core==0.19.2
	@PYTHONPATH=.venv/megatron-0.19 $(BIN)/python -m pytest -q tests/policy tests/test_train.py $(ARGS)

test-nixl: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-nixl: .venv/nixl/installed  ## refits by NIXL, which is optional and not in the lock: links, faults, an engine
	@PYTHONPATH=$(CURDIR)/.venv/nixl $(BIN)/python -m pytest -q -k nixl \
	  tests/refit tests/generation/test_processes.py $(ARGS)
	@$(if $(ARGS),,PYTHONPATH=$(CURDIR)/.venv/nixl UCX_TLS=tcp $(BIN)/python -m pytest -q -k nixl tests/refit)

.venv/nixl/installed: requirements/nixl.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --only-binary :all: --target $(@D) -r $<
	@touch $@

TRANSFORMER_ENGINES := 2.20 2.14
test-transformer-engine: $(TRANSFORMER_ENGINES:%=test-transformer-engine-%)  ## its own Python, on fake kernels, against our emulation

test-transformer-engine-%: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-transformer-engine-%: .venv/transformer-engine-%/installed
	@PYTHONPATH=$(CURDIR)/.venv/transformer-engine-$* $(BIN)/python -m pytest -q -p tests.transformer_engine.plugin \
	  -m transformer_engine tests/transformer_engine $(ARGS)

.PRECIOUS: .venv/transformer-engine-%/installed
.venv/transformer-engine-%/installed: requirements/transformer-engine-%.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --only-binary :all: --target $(@D) -r $<
	@touch $@

VLLM_MATRIX := 0.25
test-vllm-matrix: $(VLLM_MATRIX:%=test-vllm-%)  ## the generation tests with the older supported vLLM

test-vllm-%: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-vllm-%: .venv/vllm-%/installed
	@PYTHONPATH=$(CURDIR)/.venv/vllm-$* $(BIN)/python -m pytest -q tests/generation $(ARGS)
	@$(if $(ARGS),,PYTHONPATH=$(CURDIR)/.venv/vllm-$* $(BIN)/python -m pytest -q \
	  -p tests.gpu_engine.plugin tests/gpu_engine/test_methods.py)

.PRECIOUS: .venv/vllm-%/installed
.venv/vllm-%/installed: requirements/vllm-%.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --only-binary :all: --target $(@D) -r $<
	@touch $@

test-nemo-rl: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-nemo-rl: .venv/nemo-rl/installed  ## NeMo RL's own loop and loss tests with our parts; NEMO_RL_SRC names its checkout
	@PYTHONPATH=$(CURDIR)/.venv/nemo-rl $(BIN)/python -m pytest -q -rs -m nemo_rl $(ARGS)

.venv/nemo-rl/installed: requirements/nemo-rl.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --target $(@D) -r $<
	@touch $@

test-nemo-rl-trainer: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-nemo-rl-trainer: .venv/nemo-rl/installed .venv/transformer-engine-2.20/installed .venv/nemo-rl-trainer/installed
test-nemo-rl-trainer:  ## NeMo RL's own Megatron worker, on Megatron-Bridge and fake kernels, streams FP8
	@PYTHONPATH=$(CURDIR)/.venv/nemo-rl-trainer:$(CURDIR)/.venv/transformer-engine-2.20:$(CURDIR)/.venv/nemo-rl \
	  $(BIN)/python -m pytest -q -rs -p tests.transformer_engine.plugin -m nemo_rl tests/nemo_rl/stock/test_stock_trainer.py $(ARGS)

.venv/nemo-rl-trainer/installed: requirements/nemo-rl-trainer.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --ignore-requires-python --python-version 3.12 --only-binary :all: \
	  --target $(@D) -r $<
	@touch $@

test-slurm: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-slurm: setup-dev  ## the launcher on a real SLURM in namespaces; root, and what docs/launch.md names
	@$(BIN)/python -m pytest -q -rs -m slurm $(ARGS)

test-browser: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-browser: setup-dev  ## the report in a headless Chromium; BROWSER_PATH names another than that on PATH
	@$(BIN)/python -m pytest -q -rs -m browser $(ARGS)

test-loggers: export OMP_NUM_THREADS := $(OMP_NUM_THREADS)
test-loggers: .venv/loggers/installed  ## Weights & Biases and MLflow, offline; both are optional and not in the lock
	@PYTHONPATH=$(CURDIR)/.venv/loggers $(BIN)/python -m pytest -q -rs tests/run/test_loggers.py $(ARGS)

.venv/loggers/installed: requirements/loggers.txt | setup-dev
	@rm -rf $(@D)
	@$(BIN)/python -m pip install -q --no-deps --target $(@D) -r $<
	@touch $@

lint: setup-dev  ## ruff check and format check
	@$(BIN)/ruff check $(ARGS) .
	@$(BIN)/ruff format --check .

format: setup-dev  ## let ruff rewrite the files
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

types: setup-dev  ## mypy
	@$(BIN)/mypy $(ARGS) nemo_fp8rl

clean:  ## remove .venv and caches
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
