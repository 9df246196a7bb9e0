# A fresh clone needs Python (3.10 or newer), git and make; everything else is installed into .venv.
# Another interpreter: make PYTHON=python3.12 demo
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip --disable-pip-version-check

# Stamps: pip runs again only when what they depend on has changed.
RUNTIME := .venv/.runtime-installed
DEV := .venv/.dev-installed

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test soak lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(RUNTIME) ## make a video and its contact sheet with the model inside
	mkdir -p outputs
	$(BIN)/python scripts/generate.py --config demo --prompt "a red square moving left on a white background" \
	  --seed 7 --output outputs/demo.mp4 --overwrite
	@echo outputs/demo.mp4
	@$(BIN)/python scripts/contact_sheet.py outputs/demo.mp4 --overwrite

test: $(DEV) ## run the tests
	$(BIN)/pytest

soak: $(DEV) ## run the long versions of the tests that have one
	$(BIN)/pytest --soak -s tests/test_selection.py tests/test_resume.py tests/test_disk_full.py tests/test_prompts.py

lint: $(DEV) ## check style and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	mkdir -p .venv/typing && ln -sfn ../.. .venv/typing/kandinsky5_nabla
	$(BIN)/pyright

format: $(DEV) ## format the code and repair what can be repaired
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean: ## remove build products and the environment
	rm -rf .venv build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt -e .
	touch $@

$(DEV): pyproject.toml constraints.txt requirements-vocab.txt | $(BIN)/pip
	$(PIP) install -c constraints.txt -e '.[dev]'
	$(PIP) install --no-deps -r requirements-vocab.txt
	touch $(RUNTIME) $@

# pip is what venv installs last: where it exists, the environment is complete.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and \
	  "Python 3.10 or newer is needed, $(PYTHON) is " + sys.version.split()[0] + ": try make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
