# `make demo` is the whole road on this machine; QUICK=1 is its short form, FROM_SCRATCH=1 begins with random weights.
# `make check`, `make docs` and `make test-all` are what CI runs.
#
# Tests run in three lanes, each of which contains the one before it (CONTRIBUTING.md, with the minutes of each):
#   make test-fast   no process is started
#   make test        and those that start processes, and one real launch of each kind
#   make test-all    and the products, each stage, recipe, kill and host
# ARGS="-k srl" gives pytest more to go by, WORKERS=8 uses more cores, WORKERS=0 one process.
PYTHON ?= python3
WORKERS ?= 2
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin

# Where a shell forbids it, each of the many processes that tests start would compile the project anew.
export PYTHONDONTWRITEBYTECODE :=

PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --durations=20
# Of what is chosen by ARGS a lane may hold nothing, which pytest tells by 5.
CHOSEN = $(if $(ARGS),$(ARGS) || test $$? -eq 5)

.PHONY: setup demo test-fast test test-all check docs format clean

setup: $(VENV)/installed

# A torch that is in $(VENV) is kept. Without one, the package index decides the build: PyPI's for Linux has CUDA, several
# gigabytes. TORCH_INDEX=URL takes torch from another index, such as PyTorch's own for CPUs or for another CUDA.
$(VENV)/installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0 \
		$(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

demo: setup
	$(BIN)/python -m launch.demo $(if $(QUICK),--quick) $(if $(FROM_SCRATCH),--from-scratch)

# Modules whose cases share a launch stay in one worker; pure tests go wherever there is time.
test-fast: setup
	$(PYTEST) -m fast --dist worksteal $(CHOSEN)

test: test-fast
	$(PYTEST) -m launch --dist loadfile $(CHOSEN)

# All lanes at once, so that what files prepare for their tests is prepared once. The longest files begin first
# (tests/conftest.py); pytest-xdist would begin with those of the most tests. While a worker waits for its ranks, another
# one uses the core.
test-all: WORKERS = 3
test-all: setup
	$(PYTEST) --dist loadfile --no-loadscope-reorder $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Into build/docs; a warning is an error. Nothing is fetched, and the pages load nothing from other hosts.
docs: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf runs .pytest_cache .mypy_cache .ruff_cache
