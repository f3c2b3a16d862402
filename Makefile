# Every target sets itself up: a fresh machine needs Python 3.10 or newer and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check format bench clean

demo: $(VENV)/demo.stamp  ## train on half of the glyphs, be measured on the other half, read the report
	$(BIN)/nearkin train glyphs

test: $(VENV)/dev.stamp  ## the whole test suite
	$(BIN)/python -m pytest -n 2

check: $(VENV)/dev.stamp  ## what must be green before a commit
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

format: $(VENV)/dev.stamp  ## rewrite in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/dev.stamp  ## measured tables, written beside the scripts
	$(BIN)/python benchmarks/loss_memory.py
	$(BIN)/python benchmarks/losses.py
	$(BIN)/python benchmarks/class_softmax.py
	$(BIN)/python benchmarks/facility.py
	$(BIN)/python benchmarks/curves.py
	$(BIN)/python benchmarks/mining.py
	$(BIN)/python benchmarks/evaluation.py
	$(BIN)/python benchmarks/images.py
	$(BIN)/python benchmarks/trainer_overhead.py
	$(BIN)/python benchmarks/gallery.py  # serving.py needs a run and a gallery

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "nearkin needs Python 3.10 or newer, got $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[report,serve]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp
