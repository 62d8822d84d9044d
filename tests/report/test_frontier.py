"""The frontier of several runs is what their logs say."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commands import run
from made_runs import sparsify_run

from gatelens.errors import GatelensError
from gatelens.report.frontier import FrontierPoint, frontier

JUDGED = (
    "step,wiki dense loss,wiki above dense,wiki kl,wiki open,wiki keys per query,wiki idle heads\n"
    "2,3.1,0.05,0.2,0.1,4.5,0.25\n4,3.1,0.02,0.1,0.05,1.5,\n"
)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    folders = []
    for name in ("a/run", "b/run"):
        folder = sparsify_run(tmp_path / name)
        asked = json.loads((folder / "settings.json").read_text())
        asked["settings"] |= {"batch": 2, "length": 64, "accumulate": 3}
        (folder / "settings.json").write_text(json.dumps(asked))
        (folder / "judged.csv").write_text(JUDGED)
        folders.append(folder)
    return folders


def test_points_are_those_of_the_logs(runs: list[Path], tmp_path: Path) -> None:
    points = frontier(runs, tmp_path / "out")
    first = FrontierPoint("a/run", 2, 2 * 2 * 64 * 3, "wiki", 4.5, 0.05, 0.2, 0.25)
    last = FrontierPoint("b/run", 4, 4 * 2 * 64 * 3, "wiki", 1.5, 0.02, 0.1, None)
    assert (points[0], points[-1], len(points)) == (first, last, 4)
    with (tmp_path / "out" / "frontier.csv").open(newline="") as file:
        assert [float(row["keys"]) for row in csv.DictReader(file)] == [4.5, 1.5, 4.5, 1.5]
    assert (tmp_path / "out" / "frontier.png").stat().st_size > 1000


def test_the_command_prints_them(
    runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "frontier", *map(str, runs), "--out", str(tmp_path / "out")) == 0
    output = capsys.readouterr().out
    assert "+0.0200" in output
    assert "1,536" in output


def test_runs_without_evaluations(runs: list[Path], tmp_path: Path) -> None:
    for folder in runs:
        (folder / "judged.csv").unlink()
    with pytest.raises(GatelensError, match="has evaluated held-out text yet: train with --held-out"):
        frontier(runs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
