# The two commands of README.md, and their parts. Needs Python 3.10+, nothing else: `make demo`, `make test`.
PYTHON ?= python3
VENV ?= .venv
# Pinned versions (requirements/cpu.txt says why). Empty: whatever VENV holds already stays.
CONSTRAINTS ?= requirements/cpu.txt
# A pip option that finds the small CPU build of torch. Empty: only the registries that pip knows.
TORCH_INDEX ?= $$($(VENV)/bin/python requirements/torch_index.py)
# Test processes. The suite is written for two cores; each takes the tests of one half in their order, so that what a module's
# tests share is made once, and at the end takes from the other what is left.
JOBS ?= 2
PYTEST_ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(addprefix -c ,$(CONSTRAINTS))
DEVICE_SOURCES = $(shell git ls-files -co --exclude-standard -- 'hip/*.h' 'hip/*.hip' 'hip/*.cpp' 'models/*.h' 'models/*.hip')
# A stamp is older than what it was made from when either file changes: then pip brings VENV up to date in place.
INPUTS := pyproject.toml $(CONSTRAINTS)

.PHONY: demo test lint format pytest wheel clean
demo: $(VENV)/.demo-installed
	$(BIN)/rocmega demo
	$(BIN)/rocmega demo --prompt "sort banana="
	$(BIN)/rocmega demo --ranks 2 --tokens 8

test: lint pytest

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(DEVICE_SOURCES),$(BIN)/clang-format --dry-run -Werror $(DEVICE_SOURCES))

format: $(VENV)/.test-installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(if $(DEVICE_SOURCES),$(BIN)/clang-format -i $(DEVICE_SOURCES))

pytest: $(VENV)/.test-installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

wheel: $(VENV)/.test-installed
	$(BIN)/python -m build --outdir dist .

# The demo needs a C++ compiler for the CPU target: the system's, else the one in the ziglang package.
$(VENV)/.demo-installed: $(INPUTS) | $(VENV)/.created
	@echo "installing rocmega and what its demo needs into $(VENV) (a few minutes the first time)"
	extras=demo,compiler; for c in c++ g++ clang++; do ! command -v $$c >/dev/null || extras=demo; done; \
	$(PIP) $(TORCH_INDEX) -e ".[$$extras]"
	@touch $@

$(VENV)/.test-installed: $(INPUTS) | $(VENV)/.created
	@echo "installing rocmega, compilers and test tools into $(VENV) (a few minutes the first time)"
	$(PIP) $(TORCH_INDEX) -e ".[demo,amd,cuda,plot,test]"
	@touch $(VENV)/.demo-installed $@

# An environment whose Python has gone (an upgraded system, a half-made one) is made anew; nothing but an environment
# is ever cleared.
$(VENV)/.created: FORCE
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	    { echo "rocmega needs Python 3.10 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }; \
	  [ ! -e $(VENV)/pyvenv.cfg ] || clear=--clear; \
	  $(PYTHON) -m venv $$clear $(VENV); }
	@[ -e $@ ] || touch $@
FORCE:

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
