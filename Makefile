# `make demo` or `make test` can be the first command on a new machine: both set up .venv when it is missing or old.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Containers often forbid it: each of the processes that tests start would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test pages soak trust lint bench clean

setup: $(READY)

$(READY): pyproject.toml scripts/setup.sh $(wildcard setup.py kernels/build.py kernels/native/*.cpp kernels/native/*.h)
	PYTHON="$(PYTHON)" sh scripts/setup.sh $(VENV)

demo: $(READY)
	$(BIN)/pipecomp demo $(ARGS)

# File by file, so that what a file's tests share is made once; the longest files first (tests/conftest.py). Three at a
# time on two cores: some of what they take is waiting.
test: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not soak" $(ARGS)

# The shell commands of README.md, docs/using.md and docs/running, in order, as a reader gives them.
pages: $(READY)
	$(BIN)/python scripts/page_commands.py $(ARGS)

# What is long and random, or for a machine that does nothing else: kills, fuzzing, sanitizers, installing.
soak: $(READY)
	$(BIN)/python -m pytest -n 3 --dist loadfile -m soak $(ARGS)

# docs/trust.md: pipelines against unsplit training. VERSIONS="deepspeed==… transformers==…" tries other versions.
trust: $(READY)
	$(BIN)/python scripts/trust.py $(if $(VERSIONS),--versions "$(VERSIONS)") $(ARGS)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/pipecomp bench kernels $(ARGS)

clean:
	rm -rf $(VENV) demo-out build *.egg-info
