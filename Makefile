# Every target is a line over the command line of `finetune`; set-up happens by itself.
#   make train RECIPE=qwen3_0_6b_lora BACKEND=fsdp_full_shard PROCESSES=2 ARGS="optim.lr=1e-4"
# PYTHON=/path/to/python chooses the interpreter that .venv is made with, TORCH=torch==...+cu126 another
# build of the pinned PyTorch (with PIP_EXTRA_INDEX_URL saying where it is).

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help setup quickstart quickstart-dpo quickstart-grpo quickstart-images train plan prove test test-slow test-gpu test-cuda-trace test-engines coverage check bench bench-gpu clean

BIN := .venv/bin
READY := .venv/.ready
UNFINISHED := .venv/.unfinished
CPU_INDEX := https://download.pytorch.org/whl/cpu
AMD := /dev/kfd

help: ## List the targets.
	@sed -n 's/^\([a-z-]*\):.*## /\1|/p' Makefile | awk -F'|' '{ printf "  make %-17s %s\n", $$1, $$2 }'

setup: $(READY) ## Create .venv with everything in it: .venv/bin/finetune, .venv/bin/accelerate.

quickstart: $(READY) ## Train a small Llama, fine-tune it with QLoRA and compare: minutes on a laptop.
	$(BIN)/finetune quickstart $(ARGS)

quickstart-dpo: $(READY) ## Teach the same small model which of two answers is wanted (DPO): minutes on a laptop.
	$(BIN)/finetune quickstart --method dpo $(ARGS)

quickstart-grpo: $(READY) ## Teach it by a reward (GRPO), and by one that it can have without the goal: minutes on a laptop.
	$(BIN)/finetune quickstart --method grpo $(ARGS)

quickstart-images: $(READY) ## Teach a tiny model of random weights to tell the colours of pictures: a minute on a laptop.
	$(BIN)/finetune quickstart --method images $(ARGS)

train: $(READY) ## Train RECIPE= on BACKEND= with PROCESSES=; ARGS= takes overrides such as optim.lr=1e-4.
	$(BIN)/finetune launch $(JOB)

plan: $(READY) ## Say what `make train` with the same variables would do and need, and load nothing.
	$(BIN)/finetune plan $(JOB)

prove: $(READY) ## Prove every backend with LoRA, QLoRA and all weights, on two processes.
	$(BIN)/finetune prove quickstart --backends all --kinds lora,qlora,full --crossings ring --steps 6 \
		--jobs 3 --output proofs/every_backend $(ARGS)
	$(BIN)/finetune prove qwen3_0_6b_kto --backends fsdp_full_shard --steps 6 --jobs 3 \
		--output proofs/kto
	$(BIN)/finetune prove qwen3_0_6b_grpo --backends ddp --steps 6 --jobs 3 \
		--output proofs/grpo
	$(BIN)/finetune prove quickstart --backends tp,pp --kinds full --steps 6 --jobs 2 \
		--output proofs/divided $(ARGS)

test: $(READY) ## Run the everyday tests, two files at a time: WORKERS=1 for one.
ifndef COVERAGE
	$(BIN)/python -m pytest -m "not slow and not gpu" $(PARALLEL) $(HANGS) $(ARGS)
else
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest -m "not slow and not gpu" $(PARALLEL) $(HANGS) $(ARGS)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report
endif

test-slow: $(READY) ## Run the tests that take longer.
	$(BIN)/python -m pytest -m "slow and not gpu" $(PARALLEL) $(WAITING) $(ARGS)

test-gpu: $(READY) ## Run what only a GPU can show; without one, skip all of it and say so.
	@if $(SEES_GPU); then $(BIN)/python -m pytest -m gpu $(ARGS); \
	else echo "skipped every GPU test: PyTorch sees no GPU on this machine"; fi

test-cuda-trace: $(READY) ## Trace what runs on a GPU with CUDA builds of PyTorch, where there is no GPU.
	@for version in $(TRACE_TORCH); do \
		echo "PyTorch $$version"; traces=.cuda-trace/$$version; \
		$(BIN)/python -m venv $$traces --without-pip && \
		grep -v -E '^(torch|setuptools)==' constraints.txt >$$traces/constraints.txt && \
		$(BIN)/python -m pip --python $$traces/bin/python install --quiet \
			-c $$traces/constraints.txt "torch==$$version" -e '.[bitsandbytes]' pytest hypothesis && \
		$$traces/bin/python -m pytest tests/cuda_trace $(ARGS) || exit 1; \
	done

test-engines: $(READY) ## Read what is submitted to SkyPilot and Kubernetes with their own parsers; train on Ray.
	@for engine in $(ENGINES); do \
		place=.engines/$${engine%%=*}; \
		$(BIN)/python -m venv $$place --without-pip && \
		$(BIN)/python -m pip --python $$place/bin/python install --quiet $$engine pytest && \
		$$place/bin/python -m pytest --rootdir tests/engines --confcutdir tests/engines tests/engines $(ARGS) || exit 1; \
	done

coverage: $(READY) ## Run the everyday tests and say which share of the lines they run.
	$(MAKE) test COVERAGE=yes

check: $(READY) ## Check format, lint and types.
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(READY) ## Measure start-up and each backend here, then race the peers: PEERS="--workload short".
	$(BIN)/python -m benchmarks $(ARGS)
	$(BIN)/python -m benchmarks peers $(RACES)

bench-gpu: $(READY) ## Measure on GPUs, for 45 minutes at most; without one, skip all of it and say so.
	@if $(SEES_GPU); then \
		timeout --signal=INT 30m $(BIN)/python -m benchmarks --gpu --minutes 28 $(ARGS) || [ $$? = 124 ] && \
		timeout --signal=INT 15m $(BIN)/python -m benchmarks peers $(RACES) --gpu || [ $$? = 124 ]; \
	else echo "skipped every GPU benchmark: PyTorch sees no GPU on this machine"; fi

clean: ## Remove .venv, .bench, .cuda-trace and what tools left behind; runs and models stay.
	rm -rf .venv .bench .cuda-trace .engines .coverage* build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './runs/*' -prune -exec rm -rf {} +

WORKERS := 2
# One more worker where the tests of schedulers and of killed machines mostly wait.
WAITING = --numprocesses $(shell expr $(WORKERS) + 1)
PARALLEL = --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# A test that takes longer than these seconds is taken for one that hangs.
HANGS = -o faulthandler_timeout=600

# The newest and the lowest version with which GPUs are traced; each CUDA build takes six gigabytes.
# TRACE_TORCH=2.13.0 traces another one.
TRACE_TORCH := 2.14.1 2.11.0

# Large packages, each in an environment of its own.
ENGINES := skypilot==0.14.1 kubeflow==0.5.0 ray==2.60.0

RACES = --workload all --minutes 5 $(PEERS)

SEES_GPU = $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

JOB = $(strip $(RECIPE) $(ARGS) $(if $(BACKEND),--backend $(BACKEND)) \
	$(if $(PROCESSES),--processes $(PROCESSES)))

ifneq ($(filter train plan,$(MAKECMDGOALS)),)
ifndef RECIPE
$(error name a recipe: make $(MAKECMDGOALS) RECIPE=quickstart BACKEND=ddp PROCESSES=2)
endif
endif

# --- set-up: once, and again when a pin or a dependency changes -----------------------------------
# An interrupted set-up leaves its mark in .venv, and the next one starts from an empty folder: a
# package that pip had half written would otherwise pass for installed. What is installed is compiled:
# with PYTHONDONTWRITEBYTECODE set, as in many containers, Python would else compile at every import.

define find_python
for python in $(or $(PYTHON),python3 python3.11 python3.12 python3.13); do \
	"$$python" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break; \
	python=; \
done; \
if [ -z "$$python" ]; then \
	echo "finetune needs Python 3.11 or newer with its venv module; none of these is one:" \
		"$(or $(PYTHON),python3 python3.11 python3.12 python3.13)." \
		"Install one (Debian: apt-get install python3-venv) or say where it is: make setup PYTHON=/path/to/python3" >&2; \
	exit 1; \
fi
endef

# Debian's python3 has a venv module that cannot bring pip along; the system's pip then does.
define make_venv
"$$python" -m venv .venv >/dev/null 2>&1 || { \
	"$$python" -m venv --without-pip .venv && \
	"$$python" -m pip --python $(BIN)/python install --quiet pip; \
} || { \
	echo "cannot make .venv with $$python (Debian: apt-get install python3-venv)" >&2; \
	exit 1; \
}
endef

# On Linux the package index has the large CUDA build. A CPU build has the local version `+cpu`: in a
# folder that pip knows (find-links), asked first because that needs no network, or on PyTorch's own
# index. `===` keeps `+cpu` from passing for 2.x on a machine that has a GPU.
define install_torch
torch=$$(sed -n 's/^torch==//p' constraints.txt); \
pip="$(BIN)/python -m pip install --no-compile --no-deps"; \
if [ -n "$(TORCH)" ]; then \
	echo "PyTorch as asked for: $(TORCH)"; $$pip "$(TORCH)"; \
elif [ "$$(uname -s)" != Linux ]; then \
	echo "PyTorch $$torch"; $$pip "torch==$$torch"; \
elif nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then \
	echo "PyTorch $$torch for the NVIDIA GPU of this machine"; $$pip "torch===$$torch"; \
else \
	echo "PyTorch $$torch, CPU build (no NVIDIA GPU answers nvidia-smi)"; \
	if [ -e $(AMD) ]; then \
		echo "for this machine's AMD GPU: make setup TORCH=torch==$$torch+rocm... with" \
			"PIP_EXTRA_INDEX_URL= of PyTorch's builds for ROCm"; \
	fi; \
	$$pip --no-index "torch==$$torch+cpu" 2>/dev/null || \
	$$pip --index-url $(CPU_INDEX) --timeout 15 --retries 2 "torch==$$torch+cpu" || { \
		echo "no CPU build of PyTorch can be reached; taking the package index's build, which is large"; \
		$$pip "torch==$$torch"; \
	}; \
fi
endef

$(READY): pyproject.toml constraints.txt
	@if [ -e $(UNFINISHED) ]; then \
		if kill -0 "$$(cat $(UNFINISHED))" 2>/dev/null; then \
			echo "process $$(cat $(UNFINISHED)) is setting up .venv: try again when it is done" >&2; \
			exit 1; \
		fi; \
		echo "the last set-up did not finish: starting from an empty .venv"; \
		rm -rf .venv/* && rm -rf .venv; \
	fi
	@$(find_python); \
	echo "setting up .venv with $$("$$python" --version) (once; a few minutes)"; \
	mkdir -p .venv && echo $$PPID >$(UNFINISHED) && rm -f $(READY); \
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(make_venv)
	@$(install_torch)
	$(BIN)/python -m pip install --no-compile -c constraints.txt -e '.[dev]'
	@$(BIN)/python -m compileall -qq -j 0 .venv/lib finetune recipes || true
	@touch $(READY) && rm -f $(UNFINISHED)
	@echo "set-up is done: .venv/bin/finetune"
