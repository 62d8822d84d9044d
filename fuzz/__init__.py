"""Damaged and hostile inputs: every one of them must give a result, or one sentence that says what is wrong.

``python -m fuzz`` tries 20,000 inputs; the tests try a few hundred of each kind.
"""

import sys
from pathlib import Path

# The valid inputs, which are then damaged, are those of the tests.
_TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(folder) for folder in (_TESTS, _TESTS / "loading", _TESTS / "report")]
