"""Damaged inputs of every kind give a result or one sentence. `python -m fuzz` tries many more of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.harness import attempt, check
from fuzz.targets import TARGETS, Target

INPUTS = 300


@pytest.mark.parametrize("kind", TARGETS)
def test_no_error_but_ours(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GATELENS_CACHE", str(tmp_path))
    check(TARGETS[kind], max(2, round(INPUTS * TARGETS[kind].share)))


def test_an_error_of_another_type_is_found() -> None:
    def use(folder: Path) -> None:
        raise KeyError((folder / "words.json").name)

    broken = Target("broken", TARGETS["command line"].inputs, use)
    with pytest.raises(KeyError):
        check(broken, 3)


def test_a_sentence_that_is_too_long_is_found() -> None:
    from gatelens import GatelensError

    def use(folder: Path) -> None:
        raise GatelensError("x" * 100_000)

    with pytest.raises(AssertionError, match="not one clear sentence"):
        attempt(Target("long", TARGETS["command line"].inputs, use), {})
