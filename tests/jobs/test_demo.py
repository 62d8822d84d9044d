"""The demo is a study: of the built-in models, of all four tasks, and of some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

import gatelens.jobs.demo
from gatelens.errors import GatelensError
from gatelens.jobs.demo import STUDY, demo_tasks, run_demo
from gatelens.jobs.study.file import read_study
from gatelens.measures.circuit_result import load_circuit
from gatelens.model import Model


def test_the_demo_compares_the_built_in_models_on_all_four_tasks() -> None:
    cells = read_study(STUDY).cells
    assert {(cell.model.label, cell.task) for cell in cells} == {
        (model, task)
        for model in ("smollm2", "sparse-smollm2")
        for task in ("greater-than", "ioi", "docstring", "ioi-long")
    }


def test_a_task_that_the_demo_lacks_is_named() -> None:
    with pytest.raises(GatelensError, match=r"no task 'iou': its tasks are ioi, greater-than, docstring, ioi-long\."):
        run_demo(["iou"])


def test_the_name_of_a_task_is_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Square brackets are not markup of the terminal."""
    assert run(monkeypatch, "demo", "--task", "[/b]") == 2
    assert "the demo has no task '[/b]'" in capsys.readouterr().err


def test_the_first_task_has_an_edge_graph_too() -> None:
    cells = read_study(STUDY).cells
    assert {(cell.level, cell.task) for cell in cells if cell.task == demo_tasks()[0]} == {
        ("heads", "ioi"),
        ("edges", "ioi"),
    }


def test_a_part_of_the_demo_has_a_folder_and_a_report_of_its_own(
    trained: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained.hf.save_pretrained(tmp_path / "trained")
    trained.tokenizer.save_pretrained(tmp_path / "trained")
    study = tmp_path / "demo.toml"
    small = "n = 2\nsteps = 1\npoints = 3\nrandom_points = 0\nsample = 0\ndescribe = 2\nallow_noise = true\n"
    study.write_text(f'[models]\ntrained = "trained"\n[circuit]\ntasks = ["induction", "ioi"]\n{small}')
    monkeypatch.setattr(gatelens.jobs.demo, "STUDY", study)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(monkeypatch, "demo", "--out", str(tmp_path / "out")) == 0
    page = tmp_path / "out" / "induction" / "report" / "index.html"
    assert page.exists()
    said = capsys.readouterr().out
    best = load_circuit(tmp_path / "out" / "induction" / "cells" / "heads-induction-trained")
    in_order = (
        "cost: 1 cell, about",
        "what the best heads do",
        f" {best.heads.lines[0].head} ",
        f"induction in {best.model}: {best.count} of {best.curve.total} heads explain 90%.",
        str(page),
        "All tasks (induction, ioi): `gatelens demo --all`.",
    )
    places = [said.index(part) for part in in_order]
    assert places == sorted(places)
    whole = run_demo(out=tmp_path / "out")  # beside it
    assert whole.outcomes["heads-induction-trained"].status == "done"
    assert run(monkeypatch, "demo", "--all", "--task", "ioi") == 2
