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

# Steps of under ten minutes: what is done stays done in build/gpu, so that a stopped run goes on. Where nothing can be
# installed, `make gpu PYTHON=python3 PYTHONPATH=src:tests:FOLDER_OF_PACKAGES` takes that Python as it is.
GPU := $(if $(PYTHONPATH),PYTHONPATH=$(PYTHONPATH) $(PYTHON),$(BIN)/python)
GPU_TABLES := losses-128 losses-512 losses-1024 losses-2048 losses-4096 losses-16384 losses-65536
GPU_TABLES += classes-128 classes-512 classes-2048 classes-4096 many-classes many-classes-float32 facility

gpu: $(patsubst %,build/gpu/%.done,tests others $(GPU_TABLES))  ## on a machine with a GPU: every test that needs one, then the tables of docs/performance.md
	for kind in losses classes; do awk 'FNR > 1 || NR == 1' build/gpu/$$kind-[0-9]*.csv > build/gpu/$$kind.csv; done
	cp build/gpu/losses.csv benchmarks/results/losses_gpu.csv
	cp build/gpu/classes.csv benchmarks/results/class_losses_gpu.csv
	$(GPU) benchmarks/curves.py

build/gpu/%.done: $(if $(PYTHONPATH),,$(VENV)/dev.stamp)
	mkdir -p build/gpu
	$(GPU) $(GPU_STEP)
	touch $@

build/gpu/tests.done: GPU_STEP = -m pytest -n 8 tests/gpu tests/kernels
build/gpu/others.done: GPU_STEP = -m pytest -n 8 -k "cuda or device" --ignore tests/gpu
build/gpu/losses-%.done: GPU_STEP = benchmarks/losses.py --sizes $(lastword $(subst -, ,$*)) --seconds 0.2 --out build/gpu/$*.csv
build/gpu/classes-%.done: GPU_STEP = benchmarks/losses.py --classes --sizes $(lastword $(subst -, ,$*)) --out build/gpu/$*.csv
build/gpu/many-classes.done: GPU_STEP = benchmarks/class_softmax.py
build/gpu/many-classes-float32.done: GPU_STEP = benchmarks/class_softmax.py --dtype float32
build/gpu/facility.done: GPU_STEP = benchmarks/facility.py

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
