# The front door. `make help` lists the commands; every one sets up what it needs and redoes nothing.
PYTHON ?= python3
BUILD := build
JOBS ?= $(shell nproc)
OUT ?= runs/train
ARGS ?=
# GPU=sample, for a machine that will not run the kernels: few are compiled (src/gpu/quantize/kernels.h),
# hardly optimised. It counts only when $(BUILD) is first configured.
GPU ?= whole

venv := .venv
python := $(venv)/bin/python
requirements := requirements.txt requirements-dev.txt
cxx_files = $(shell find include src binding bench tests examples cmake -name '*.h' -o -name '*.cc' -o -name '*.cu')

.DELETE_ON_ERROR:
.PHONY: help setup build train test bench lint format asan arm archs hip waits oldest wheel clean

help:  ## this list
	@echo "usage: make COMMAND [ARGS=...]"
	@sed -n 's/^\([a-z]*\):.*##  *\(.*\)/    make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

# --- setup: stamps carry the state; each is redone when what it was made from is newer ------------
$(BUILD)/.system-packages: tools/system_packages.sh
	@mkdir -p $(BUILD)
	@PYTHON=$(PYTHON) tools/system_packages.sh
	@touch $@

$(venv)/.requirements: $(requirements) tools/develop.py | $(BUILD)/.system-packages
	test -x $(python) || $(PYTHON) -m venv $(venv)
	$(python) -m pip install --quiet --disable-pip-version-check --no-compile -r requirements-dev.txt
	$(python) tools/develop.py
	@touch $@

$(BUILD)/build.ninja: $(venv)/.requirements
	cmake -S . -B $(BUILD) -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython3_EXECUTABLE="$(CURDIR)/$(python)" \
	    -DBLOCKSCALE_GPU_SAMPLE=$(if $(filter sample,$(GPU)),ON,OFF) \
	    -DBLOCKSCALE_TESTS=ON -DBLOCKSCALE_EMULATED=ON -DBLOCKSCALE_BENCH=ON -DBLOCKSCALE_TORCH=ON
	@touch $@

build: $(BUILD)/build.ninja
	@cmake --build $(BUILD) -j $(JOBS)
	@cmake --install $(BUILD) --component python --prefix python >/dev/null

setup: build  ## packages, .venv and build, on first use or when something changed

# --- the commands --------------------------------------------------------------------------------
# A run that is already in the folder goes on where it stopped; OUT=... starts another beside it.
train: setup  ## the main job: train on real text in every recipe (a short run: OUT=runs/short ARGS="--steps 5")
	$(venv)/bin/blockscale train --out $(OUT) $(if $(wildcard $(OUT)/settings.json),--resume) $(ARGS)

test: setup  ## every test, C++ and Python
	@$(python) tools/test.py --gtest $(BUILD)/blockscale_tests \
	    --gtest $(BUILD)/tests/cpp/emulated/blockscale_emulated_tests --pytest

bench: setup  ## speed against memcpy, torch.mm and torchao, as JSON in bench/results/cpu.json
	$(python) bench/run.py --core $(BUILD)/blockscale_bench --out bench/results/cpu.json $(ARGS)

lint: $(venv)/.requirements  ## clang-format, ruff and mypy
	$(venv)/bin/clang-format --dry-run -Werror $(cxx_files)
	$(venv)/bin/ruff check .
	$(venv)/bin/ruff format --check .
	$(venv)/bin/mypy

format: $(venv)/.requirements  ## rewrite the sources the way lint wants them
	$(venv)/bin/clang-format -i $(cxx_files)
	$(venv)/bin/ruff check --fix .
	$(venv)/bin/ruff format .

gpu_sources = $(shell find src/gpu -name '*.cu')

# Compiled, not run (so hardly optimised): the build itself is for sm_90a. All sources are one, as most
# of the time goes to headers.
archs := 80 89 100a 120a
archs:  ## compile the GPU code for other NVIDIA chips, where nvcc is found (nothing is run)
	@if ! command -v nvcc >/dev/null; then echo "archs: nvcc was not found; nothing to compile"; exit 0; fi; \
	mkdir -p $(BUILD) && printf '#include "%s"\n' $(gpu_sources) $(wildcard src/cuda/*.cu) > $(BUILD)/archs.cu && \
	printf '%s\n' $(archs) | xargs -P $(JOBS) -I ARCH nvcc -std=c++20 -Ofc max -fmad=false -Werror all-warnings \
	    -gencode arch=compute_ARCH,code=sm_ARCH -I. -Iinclude -Isrc -DBLOCKSCALE_GPU_TARGETS='"sm_ARCH"' \
	    -DBLOCKSCALE_SAMPLE=2 -cubin -o /dev/null $(BUILD)/archs.cu && \
	echo "compiled src/gpu and src/cuda for: $(archs)"

# The same code as HIP: by Debian's hipcc, host side and all, and for a newer chip by a newer clang.
# Optimised, FP4 kernels take minutes; not at all, ROCm's __syncthreads_or, which groups ask for, keeps
# instructions of other chips. (Two make targets must not install packages at a time.)
hip_gfx90a := env HIP_PLATFORM=amd hipcc -c --offload-arch=gfx90a
hip_gfx942 := clang++-19 -O0 -nogpulib --offload-device-only -S --offload-arch=gfx942
hip: | $(BUILD)/.system-packages  ## compile the GPU code as HIP for AMD's gfx90a and gfx942 (nothing is run)
	@PYTHON=$(PYTHON) tools/system_packages.sh hip
	@printf '#include "%s"\n' $(filter src/gpu/groups/%,$(gpu_sources)) > $(BUILD)/hip_groups.cu
	@printf '#include "%s"\n' $(filter-out src/gpu/groups/%,$(gpu_sources)) > $(BUILD)/hip_others.cu
	@printf "'%s' $(BUILD)/hip_%s.cu\n" "$(hip_gfx942)" others "$(hip_gfx90a) -O0" others \
	    "$(hip_gfx942)" groups "$(hip_gfx90a) -O1" groups | \
	    xargs -P $(JOBS) -L 1 sh -c '$$0 -x hip -std=c++20 -ffp-contract=off -Wall -Wextra -Werror -Wno-pass-failed \
	        -I. -Iinclude -Isrc -DBLOCKSCALE_GPU_TARGETS=\"AMD\" -DBLOCKSCALE_SAMPLE=2 -o /dev/null $$1' && \
	echo "compiled src/gpu as HIP for gfx90a and gfx942; nothing was run"

asan: $(venv)/.requirements  ## the C++ tests of the CPU under AddressSanitizer and UBSan
	@test -f build-asan/build.ninja || cmake -S . -B build-asan -G Ninja -DBLOCKSCALE_TESTS=ON \
	    -DBLOCKSCALE_GPU=OFF -DBLOCKSCALE_QUICK=ON -DBLOCKSCALE_SANITIZE=address,undefined
	@cmake --build build-asan -j $(JOBS)
	@UBSAN_OPTIONS=print_stacktrace=1 $(python) tools/test.py --gtest build-asan/blockscale_tests

# Tests are linked statically, so that the emulator needs no library of that processor.
arm: $(venv)/.requirements  ## the C++ tests on AArch64, in an emulator
	@PYTHON=$(PYTHON) tools/system_packages.sh arm
	@test -f build-arm/build.ninja || cmake -S . -B build-arm -G Ninja --toolchain cmake/aarch64.cmake \
	    -DBLOCKSCALE_TESTS=ON -DBLOCKSCALE_GPU=OFF -DBLOCKSCALE_QUICK=ON -DBLOCKSCALE_GTEST=/usr/src/googletest/googletest
	@cmake --build build-arm -j $(JOBS)
	@$(python) tools/test.py --under qemu-aarch64-static --gtest build-arm/blockscale_tests

# The headers of a newer PyTorch have macros that the oldest lacks. (From PyPI it comes with CUDA.)
waits: build  ## check in the machine code that kernels wait before they touch memory (needs cuobjdump)
	@$(python) tools/waits.py python/blockscale/lib/libblockscale_torch.so

oldest: $(venv)/.requirements  ## build the wheel and run the Python tests with PyTorch 2.11 (gigabytes to download)
	@test -d build-oldest/torch || $(python) -m pip install --quiet --target build-oldest torch==2.11.0
	@PYTHONPATH=$(CURDIR)/build-oldest $(python) -m pip wheel --quiet --no-build-isolation --no-deps \
	    -C build-dir=build-oldest/build -C cmake.define.BLOCKSCALE_GPU=OFF --wheel-dir build-oldest .
	@$(python) -m pip install --quiet --no-deps --upgrade --target build-oldest build-oldest/blockscale-*.whl
	@PYTHONPATH=$(CURDIR)/build-oldest $(python) -m pytest -n $(JOBS) --dist=loadfile \
	    --ignore tests/python/test_packaging.py

wheel: $(venv)/.requirements  ## one wheel for every Python and PyTorch, in dist/
	$(python) -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:  ## forget every build; .venv and runs/ stay
	rm -rf build build-asan build-arm build-oldest build-wheel dist python/blockscale/lib .mypy_cache .ruff_cache .pytest_cache
