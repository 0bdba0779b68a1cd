# Two commands do everything on a fresh machine:
#   make demo   installs what is missing and trains a real model, as a job on the local target
#   make test   installs what is missing and runs the tests
# and for daily work
#   make test-fast      runs the tests that need no cluster
#   make test-affected  runs the tests that depend on what has changed, those marked `long` too
#   make test-all       runs every test, those marked `long` too
#   make test-gpu       runs the tests that need an NVIDIA GPU, which the others hide

VENV ?= .venv
BIN := $(VENV)/bin
# The tests wait for processes more than they compute; those of one file stay together and share what they start.
WORKERS ?= 6

PYTEST_FLAGS := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
test test-all test-fast test-affected: export CUDA_VISIBLE_DEVICES :=

.PHONY: demo test test-all test-affected test-fast test-gpu check build bench golden clean

demo: $(VENV)/.installed-demo
	$(BIN)/accel submit --target local --procs-per-node 2 --follow examples/digits/train.py
	$(BIN)/accel status @last

test: $(VENV)/.installed-dev
	$(BIN)/python -m tests.rerun $(PYTEST_FLAGS) --durations 120 -m "not long"

test-all: $(VENV)/.installed-dev
	$(BIN)/python -m tests.rerun $(PYTEST_FLAGS) --durations 50

# For daily work: all but what tests/shares.py marks as `server`, which are the clusters, and what takes minutes.
test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --durations 25 -m "not server and not long"

# The `long` tests too. Unlike `make test` it is no gate: docs/tested.md says what scripts/affected cannot see.
test-affected: $(VENV)/.installed-dev
	@files=$$(PYTHON=$(BIN)/python scripts/affected) || exit; \
	if [ -z "$$files" ]; then echo "no test depends on what was changed"; else set -x; \
	$(BIN)/python -m pytest $(PYTEST_FLAGS) --durations 25 $$files; fi

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tests.budget
	$(BIN)/mypy

build: $(VENV)/.installed-dev
	scripts/build $(VENV)

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

$(VENV)/.installed-%: pyproject.toml constraints.txt scripts/install
	scripts/install $(VENV) $*
	touch $@

golden: $(VENV)/.installed-dev
	ACCEL_RENEW_GOLDEN=1 $(BIN)/python -m pytest -q tests/schedulers/local/test_plan.py \
		tests/schedulers/kubernetes/manifests/test_build.py tests/schedulers/kubernetes/manifests/test_plan.py tests/helm/test_generated.py
	ACCEL_RENEW_GOLDEN=1 $(BIN)/python -m pytest -q tests/schedulers/kubernetes/test_tpu_slices.py -k test_the_objects
	ACCEL_RENEW_GOLDEN=1 $(BIN)/python -m pytest -q tests/cli/test_image.py -k deploy
	git diff --stat tests/golden

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .hypothesis
