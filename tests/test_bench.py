"""The table of benchmarks: measurements pass through a pipe, and a wrong name gives one sentence. Nothing is timed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from bench.__main__ import NAMES, cells  # noqa: E402
from bench.measurements import Measurement, read_output, show  # noqa: E402


def test_measurements_are_read_as_they_were_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--json"])
    measurements = [Measurement("EAP", 1.25, "F + FB", 1, 1.5), Measurement("FB", 2.0, "F")]
    for measurement in measurements:
        print("a note")
        show(measurement)
    lines = capsys.readouterr().out.splitlines()
    assert list(read_output(iter(lines))) == ["a note", measurements[0], "a note", measurements[1]]


def test_measurements_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench"])
    show(Measurement("EAP", 1.25, "F + FB", 1, 1.5))
    assert capsys.readouterr().out.split() == ["EAP", "1.25", "F", "+", "FB", "(floor", "1,", "at", "most", "1.5)"]


def test_a_measurement_above_its_limit_is_marked() -> None:
    assert [cells(Measurement("a", value, "F", 1, 1.5))[-1] for value in (1.4, 1.5, 1.6)] == ["", "", "above"]
    assert cells(Measurement("a", 9.0, "F")) == ["a", "9", "F", "", "", ""]


def test_every_benchmark_is_in_the_table() -> None:
    assert {"heads", "circuits", "gated_attention", "head_gating", "sparsify", "peers"} <= set(NAMES)
    assert not {"measurements", "timing", "__init__", "__main__"} & set(NAMES)


def test_a_wrong_name_gives_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "haeds"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("no benchmark 'haeds': there are ")
    assert len(done.stderr.splitlines()) == 1
