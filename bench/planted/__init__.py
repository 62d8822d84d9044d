"""How well each method finds circuits that are known: ``python -m bench.planted`` writes docs/planted.md."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))  # the models and tasks of the tests
