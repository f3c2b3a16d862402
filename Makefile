# Every target sets itself up: a fresh machine needs Python 3.10 or newer and make.
PYTHON ?= python3
FLOOR_PYTHON ?= python3.10
VENV := .venv
FLOOR := .venv-floor
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test check rest docs faults gpu floor format bench clean

demo: $(VENV)/demo.stamp  ## train on half of the glyphs, be measured on the other half, read the report
	$(BIN)/nearkin train glyphs

test: $(VENV)/dev.stamp  ## the tests but the slow ones: under five minutes on two cores
	$(BIN)/python -m pytest -n 2 -m "not slow"

check: test rest  ## what must be green before a commit: all tests, format, lint, types and the site

rest: $(VENV)/dev.stamp  ## what `make check` does beside `make test`
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	$(BIN)/python -m pytest -n 2 -m slow

docs: $(VENV)/dev.stamp  ## the site: build/site/index.html opens without a server; a broken link ends the build
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

faults: $(VENV)/dev.stamp  ## damages, full disks and kills, ten times as many as the suite tries; about 15 minutes
	NEARKIN_FAULTS=10 $(BIN)/python -m pytest -n 2 tests/faults
	$(BIN)/python studies/gallery_kills.py --kills 40 --store $(if $(filter Linux,$(shell uname -s)),both,sqlite)
	$(BIN)/python studies/backup_kills.py --kills 5
	$(BIN)/python studies/kill_and_resume.py --kills 6
	$(BIN)/python studies/kill_ranks.py --kills 4  # reads /proc: Linux
	$(BIN)/python studies/kill_and_compare.py --kills 3 --source vectors

gpu: $(VENV)/dev.stamp  ## on a machine with a GPU: every test that needs one, then the tables of docs/performance.md
	$(BIN)/python -m pytest -n 8 tests/gpu
	$(BIN)/python -m pytest -n 8 -k "cuda or device" --ignore tests/gpu
	$(BIN)/python benchmarks/losses.py --seconds 0.2 --out benchmarks/results/losses_gpu.csv
	$(BIN)/python benchmarks/losses.py --classes
	$(BIN)/python benchmarks/class_softmax.py
	$(BIN)/python benchmarks/class_softmax.py --dtype float32
	$(BIN)/python benchmarks/facility.py
	$(BIN)/python benchmarks/curves.py

floor: $(FLOOR)/test.stamp  ## the test suite with the oldest Python and packages that pyproject.toml allows
	TORCHINDUCTOR_CACHE_DIR=$(abspath $(FLOOR))/inductor $(FLOOR)/bin/python -m pytest -n 2

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
	rm -rf $(VENV) $(FLOOR) build dist .mypy_cache .ruff_cache .pytest_cache

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "nearkin needs Python 3.10 or newer, got $$($(PYTHON) --version); try make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/demo.stamp

$(FLOOR)/bin/python:
	@$(FLOOR_PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 10))' || \
		{ echo "make floor needs Python 3.10, the oldest allowed; try make floor FLOOR_PYTHON=/path/to/python3.10"; exit 1; }
	$(FLOOR_PYTHON) -m venv $(FLOOR)

$(FLOOR)/test.stamp: pyproject.toml constraints-floor.txt | $(FLOOR)/bin/python
	$(FLOOR)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-floor.txt -e '.[test]'
	@touch $@
