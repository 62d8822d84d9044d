"""The table of benches: rows go through a pipe unharmed, and a wrong name is one sentence. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.__main__ import NAMES, cells  # noqa: E402
from bench.rows import Row, heard, say  # noqa: E402


def test_rows_are_heard_as_they_were_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--rows"])
    rows = [Row("EAP", 1.25, "F + FB", 1, 1.5), Row("FB", 2.0, "F")]
    for row in rows:
        print("a note")
        say(row)
    said = capsys.readouterr().out.splitlines()
    assert list(heard(iter(said))) == ["a note", rows[0], "a note", rows[1]]


def test_rows_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    say(Row("EAP", 1.25, "F + FB", 1, 1.5))
    assert capsys.readouterr().out.split() == ["EAP", "1.25", "F", "+", "FB", "(floor", "1,", "at", "most", "1.5)"]


def test_what_is_above_its_limit_is_marked() -> None:
    assert [cells(Row("a", value, "F", 1, 1.5))[-1] for value in (1.4, 1.5, 1.6)] == ["", "", "above"]
    assert cells(Row("a", 9.0, "F")) == ["a", "9", "F", "", "", ""]


def test_every_bench_says_rows() -> None:
    assert {"heads", "circuits", "gated_attention", "head_gating", "sparsify", "peers"} <= set(NAMES)
    assert not {"rows", "timing", "__init__", "__main__"} & set(NAMES)


def test_a_wrong_name_is_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "haeds"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no bench 'haeds': benches are ")
    assert len(done.stderr.splitlines()) == 1
