"""The demo is a study: of the built-in models, of all four tasks, and of some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import gatelens.jobs.demo
from gatelens.errors import GatelensError
from gatelens.jobs.demo import STUDY, run_demo
from gatelens.jobs.study.file import read_study
from gatelens.model import Model
from gatelens.report.page import write_report


def test_the_demo_compares_the_built_in_models_on_all_four_tasks() -> None:
    cells = read_study(STUDY).cells
    assert {(cell.model.label, cell.task) for cell in cells} == {
        (model, task)
        for model in ("smollm2", "sparse-smollm2")
        for task in ("greater-than", "ioi", "docstring", "ioi-long")
    }


def test_a_task_that_the_demo_lacks_is_named() -> None:
    with pytest.raises(GatelensError, match=r"no task 'iou': its tasks are greater-than, ioi, docstring, ioi-long\."):
        run_demo(["iou"])


def test_a_part_of_the_demo_has_a_folder_and_a_report_of_its_own(
    stories: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stories.hf.save_pretrained(tmp_path / "stories")
    stories.tokenizer.save_pretrained(tmp_path / "stories")
    study = tmp_path / "demo.toml"
    small = "n = 2\nsteps = 1\npoints = 3\nsample = 0\nallow_noise = true\n"
    study.write_text(f'[models]\nstories = "stories"\n[circuit]\ntasks = ["induction", "ioi"]\n{small}')
    monkeypatch.setattr(gatelens.jobs.demo, "STUDY", study)
    summary = run_demo(["induction"], tmp_path / "out", write_report=write_report)
    assert [outcome.status for outcome in summary.outcomes.values()] == ["done"]
    assert summary.report == tmp_path / "out" / "induction" / "report" / "index.html"
    assert summary.report.exists()
    assert "index.html" in capsys.readouterr().out
    whole = run_demo(out=tmp_path / "out")  # beside it
    assert whole.outcomes["heads-induction-stories"].status == "done"
