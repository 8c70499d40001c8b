# `make demo` shows what deltaspan does, `make test` checks it. Each first makes the virtual environment that it needs.

PYTHON ?= python3# any Python from 3.11 on; `make clean` before changing it
TORCH ?= torch==2.13.0# what is installed if PYTHON has no torch of its own
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu# where from; empty: where pip looks anyway
TRITONS ?= triton==3.6.0 triton# what kernels are compiled with: the release that torch 2.11 brings, and the newest
ARGS ?=# handed on, e.g. make demo ARGS="--ranks 2", make test ARGS="-k layout"

VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install

# Runs a command in silence; if it fails, shows what it said.
quietly = { $(1); } >$(VENV)/install.log 2>&1 || { cat $(VENV)/install.log; exit 1; }

.PHONY: demo test kernels clean

demo: $(VENV)/installed
	@$(PY) -m deltaspan demo $(ARGS)

# Who asks for some tests wants no kernels: they are compiled without ARGS only. All tests are shared out to two
# processes, by files, whose fixtures are dear.
test: $(VENV)/installed
	@$(PY) -m ruff check
	@$(PY) -m ruff format --check
	@$(PY) -m pytest $(or $(ARGS),--numprocesses 2 --dist loadfile)
	@$(if $(strip $(ARGS)),,$(MAKE) --no-print-directory kernels)

# Compiles every kernel for sm_90a, which needs no GPU, with each release by itself; and those of the tests. A release
# is fetched once, the newest too: only `make clean` lets go of it.
ifeq ($(shell uname -s),Linux)
kernels: $(VENV)/installed
	@for release in $(TRITONS); do \
	    folder=$(CURDIR)/$(VENV)/$$release; \
	    [ -d "$$folder" ] || { $(call quietly,$(PIP) --no-deps --target "$$folder" "$$release"); }; \
	    export PYTHONPATH="$$folder" TRITON_CACHE_DIR=$(CURDIR)/$(VENV)/triton-cache; \
	    { $(PY) -m deltaspan.bench.compile && $(PY) -m pytest -q -m triton; } 2>$(VENV)/kernels.log || { \
	        cat $(VENV)/kernels.log; exit 1; }; \
	done
else
kernels:
	@echo "kernels are compiled on Linux only: pip has no Triton for $$(uname -s)"
endif

clean:
	rm -rf $(VENV) deltaspan.egg-info .pytest_cache .ruff_cache .hypothesis
	find deltaspan tests examples -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/installed: pyproject.toml $(VENV)/torch
	@echo "installing deltaspan and its tools into $(VENV)"
	@$(call quietly,$(PIP) --editable ".[dev]")
	@touch $@

# A torch that PYTHON can import is used, wherever it lies: --system-site-packages does not show a venv the packages of
# another venv, so a .pth file names the folder. Without one, torch comes from TORCH_INDEX, for on Linux pip's own index
# gives the CUDA build of several GB. Behind a proxy, or on an offline mirror, that index cannot be reached, and pip
# would retry for minutes for each package: one request, ended after 5 s (10 s if it hangs in the name lookup, which
# no timeout covers), tells beforehand. Then, or if the index fails later, pip looks where it is configured to look.
$(VENV)/torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "deltaspan needs Python 3.11 or newer, but $(PYTHON) is: $$($(PYTHON) --version 2>&1)."; \
	    echo "Name another one, for example: make $(or $(MAKECMDGOALS),demo) PYTHON=python3.12"; exit 1; }
	@if folder=$$($(PYTHON) -c "$$TORCH_FOLDER" 2>/dev/null); then \
	    echo "making $(VENV) with the torch in $$folder"; \
	    $(PYTHON) -m venv --clear --system-site-packages $(VENV) && \
	    echo "$$folder" >"$$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torch_of_the_host.pth"; \
	else \
	    echo "making $(VENV) with $(TORCH), which may take minutes to fetch"; \
	    $(PYTHON) -m venv --clear $(VENV) && \
	    if [ -n "$(TORCH_INDEX)" ] && ($(PY) -c "$$REACH_INDEX" || exit 1) >/dev/null 2>&1; then \
	        $(call quietly,$(PIP) --index-url $(TORCH_INDEX) "$(TORCH)" || $(PIP) "$(TORCH)"); \
	    else \
	        $(call quietly,$(PIP) "$(TORCH)"); \
	    fi; \
	fi
	@touch $@

define TORCH_FOLDER
import pathlib, torch
assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 11)
print(pathlib.Path(torch.__file__).parents[1])
endef
export TORCH_FOLDER

define REACH_INDEX
import signal, urllib.request
signal.alarm(10)
urllib.request.urlopen("$(TORCH_INDEX)/torch/", timeout=5)
endef
export REACH_INDEX
