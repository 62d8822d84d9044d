"""Commands that run some cells of a study only."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands import run
from studies import LEVELS, go, numbers, write_study

from gatelens import GatelensError
from gatelens.jobs.study.chosen import chosen_cells
from gatelens.jobs.study.file import read_study
from gatelens.jobs.study.run import run_study

pytestmark = [
    pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning"),
    pytest.mark.usefixtures("no_report"),
]


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ((), "heads-dense edges-dense heads-sparse edges-sparse roles-dense"),
        (("model=dense",), "heads-dense edges-dense roles-dense"),
        (("model=*e", "level=edges"), "edges-dense edges-sparse"),
        (("heads-*-dense",), "heads-dense"),
        (("cell=heads-*", "edges-*-sparse"), "heads-dense heads-sparse edges-sparse"),
        (("level=edges", "model=sparse"), "edges-sparse"),
        (("level=edges", "level=heads", "task=induction", "model=sparse"), "heads-sparse edges-sparse"),
        (("steps=2", "level=heads"), "heads-dense heads-sparse"),
        (("seeds=2",), "roles-dense"),
    ],
)
def test_conditions(conditions: tuple[str, ...], names: str, place: Path) -> None:
    study = read_study(write_study(place, circuit=LEVELS, gate=True))
    chosen = {cell.name.replace("-induction", "") for cell in chosen_cells(study.cells, conditions)}
    assert chosen == set(names.split())


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        (("model=dens",), "no model 'dens': did you mean 'dense'\\? There are dense, sparse"),
        (("modle=dense",), "no key of cells 'modle': did you mean 'model'"),
        (("attention-*",), "no cell 'attention-\\*': .*There are .*edges-induction-dense"),
        (("updates=27",), "no updates '27': .*There are 26"),
        (("model=sparse", "seeds=2"), "no cell of the study fulfils all of model=sparse, seeds=2"),
    ],
)
def test_mistakes(conditions: tuple[str, ...], message: str, place: Path) -> None:
    study = read_study(write_study(place, circuit=LEVELS, gate=True))
    with pytest.raises(GatelensError, match=message):
        chosen_cells(study.cells, conditions)


def test_parts_make_the_whole(place: Path, no_report: list[list[str]]) -> None:
    """Two commands for one model each leave the same folder as one command for both."""
    file = write_study(place, circuit=LEVELS)
    first = run_study(read_study(file), place / "parts", only=["model=dense"])
    assert {name: outcome.status for name, outcome in first.outcomes.items()} == {
        "heads-induction-dense": "done",
        "edges-induction-dense": "done",
        "heads-induction-sparse": "waiting",
        "edges-induction-sparse": "waiting",
    }
    summary = json.loads((place / "parts" / "summary.json").read_text())
    assert (summary["done"], summary["failed"], summary["waiting"], summary["multipliers"]) == (2, 0, 2, [])
    assert sorted(path.name for path in (place / "parts" / "cells").iterdir()) == sorted(
        name for name, outcome in first.outcomes.items() if outcome.status == "done"
    )
    second = run_study(read_study(file), place / "parts", only=["model=sparse"])
    whole = go(file, place / "whole")
    assert numbers(place / "parts") == numbers(place / "whole")
    assert second.comparisons == whole.comparisons  # with the dense cells of the first command
    assert (second.done, second.failed, second.waiting) == (4, 0, 0)


def test_published_cells_stay_in_the_summary(place: Path) -> None:
    """Published results have no states of cells. A command for one model keeps the others in the tables."""
    file = write_study(place, gate=True)
    go(file, place / "out")
    before = json.loads((place / "out" / "summary.json").read_text())
    shutil.rmtree(place / "out" / "state")
    summary = run_study(read_study(file), place / "out", only=["model=dense", "level=heads"])
    assert (summary.done, summary.waiting) == (3, 0)
    assert json.loads((place / "out" / "summary.json").read_text()) == before
    (place / "out" / "cells" / "heads-induction-sparse" / "result.json").write_text("{")
    shutil.rmtree(place / "out" / "state")
    summary = run_study(read_study(file), place / "out", only=["model=dense"])
    assert summary.outcomes["heads-induction-sparse"].status == "waiting"


def test_what_other_processes_write_stays(place: Path) -> None:
    """A half-written file may belong to a process that runs other cells, until all cells are done."""
    file, half = write_study(place), place / "out" / "state" / "heads-induction-sparse.json.tmp"
    half.parent.mkdir(parents=True)
    half.write_text("{")
    run_study(read_study(file), place / "out", only=["model=dense"])
    assert half.exists()
    run_study(read_study(file), place / "out")
    assert not half.exists()


def test_on_the_command_line(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_study(place, circuit=LEVELS))
    monkeypatch.chdir(place)
    assert run(monkeypatch, "study", file, "--only", "model=dense", "--only", "heads-*", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "heads-induction-dense" in printed
    assert "edges" not in printed
    assert "sparse" not in printed
    assert run(monkeypatch, "study", file, "--only", "model=dens") == 2
    assert capsys.readouterr().err.startswith("gatelens: no model 'dens': did you mean 'dense'?")
    assert not (place / "runs").exists()
