"""Folders of results: whole, continued, refused, damaged."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gatelens import GatelensError
from gatelens.measures.curves import Curve
from gatelens.measures.results import ASKED, RESULT, load_curve, open_folder, save_curve
from gatelens.runtime.files import read_json, read_tensors, write_json
from gatelens.runtime.versions import versions

REQUEST = {"model": {"name": "a", "fingerprint": "1"}, "settings": {"n": 3, "level": "heads"}}


def some_curve(random: bool = True) -> Curve:
    torch.manual_seed(0)
    metrics = torch.randn(2, 4, 5)
    curve = Curve(
        "edges", 9, [0, 1, 4, 9], torch.tensor([0, 0.5, 4, 9]), metrics, metrics[:, 0], metrics[:, -1], "signed", "zero"
    )
    return replace(curve, random=replace(curve, metrics=metrics + 1)) if random else curve


class TestOpenFolder:
    def test_a_new_folder_is_claimed(self, tmp_path: Path) -> None:
        assert open_folder(tmp_path / "a" / "b", REQUEST) is False
        assert json.loads((tmp_path / "a" / "b" / ASKED).read_text()) == REQUEST

    def test_the_same_request_goes_on_until_it_is_complete(self, tmp_path: Path) -> None:
        open_folder(tmp_path, REQUEST)
        (tmp_path / "pieces").mkdir()
        assert open_folder(tmp_path, REQUEST) is False
        write_json(tmp_path / RESULT, {})
        assert open_folder(tmp_path, REQUEST) is True

    def test_another_request_is_refused_and_says_what_differs(self, tmp_path: Path) -> None:
        open_folder(tmp_path, REQUEST)
        other = {**REQUEST, "settings": {"n": 4, "level": "heads"}}
        with pytest.raises(GatelensError, match=r"settings \{'n': 3\}, not \{'n': 4\}"):
            open_folder(tmp_path, other)
        assert read_json(tmp_path / ASKED) == REQUEST

    def test_a_foreign_folder_is_refused_and_left_alone(self, tmp_path: Path) -> None:
        (tmp_path / "thesis.tex").write_text("mine")
        with pytest.raises(GatelensError, match="holds other files"):
            open_folder(tmp_path, REQUEST)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]

    def test_a_start_that_was_killed_while_it_wrote_is_no_foreign_folder(self, tmp_path: Path) -> None:
        (tmp_path / "asked.123.tmp").write_text("{")
        assert open_folder(tmp_path, REQUEST) is False

    def test_a_file_and_a_folder_below_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("mine")
        with pytest.raises(GatelensError, match="is a file"):
            open_folder(tmp_path / "file", REQUEST)
        with pytest.raises(GatelensError, match="cannot write to"):
            open_folder(tmp_path / "file" / "folder", REQUEST)
        assert (tmp_path / "file").read_text() == "mine"

    def test_a_damaged_request(self, tmp_path: Path) -> None:
        (tmp_path / ASKED).write_text("{")
        with pytest.raises(GatelensError, match="the folder is damaged"):
            open_folder(tmp_path, REQUEST)


class TestCurves:
    @pytest.mark.parametrize("random", [True, False])
    def test_round_trip(self, random: bool, tmp_path: Path) -> None:
        curve = some_curve(random)
        save_curve(curve, tmp_path)
        found = load_curve(tmp_path)
        pairs = [(found, curve)] + ([(found.random, curve.random)] if random else [])
        assert (found.random is None) is not random
        for mine, wanted in pairs:
            for name in ("kept", "metrics", "none", "everything", "effect", "low", "high"):
                assert torch.equal(getattr(mine, name), getattr(wanted, name))
            for name in ("level", "total", "asked", "ranking", "source"):
                assert getattr(mine, name) == getattr(wanted, name)

    def test_what_is_plotted_is_plain_text(self, tmp_path: Path) -> None:
        curve = some_curve()
        save_curve(curve, tmp_path)
        with (tmp_path / "curve.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["ranking"] for row in rows] == ["signed"] * 4 + ["random"] * 4
        assert [float(row["effect"]) for row in rows[:4]] == pytest.approx(curve.effect.tolist(), rel=1e-4, abs=1e-5)
        assert [float(row["high"]) for row in rows[4:]] == pytest.approx(curve.random.high.tolist(), rel=1e-4, abs=1e-5)

    def test_damaged_files(self, tmp_path: Path) -> None:
        with pytest.raises(GatelensError, match=r"it has no curve\.json"):
            load_curve(tmp_path)
        save_curve(some_curve(), tmp_path)
        whole = (tmp_path / "curve.safetensors").read_bytes()
        (tmp_path / "curve.safetensors").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(GatelensError, match="the folder is damaged"):
            load_curve(tmp_path)
        (tmp_path / "curve.safetensors").unlink()
        with pytest.raises(GatelensError, match="the folder is damaged"):
            read_tensors(tmp_path / "curve.safetensors")
        save_curve(some_curve(), tmp_path)
        write_json(tmp_path / "curve.json", {"level": "edges"})
        with pytest.raises(GatelensError, match="is missing"):
            load_curve(tmp_path)
        (tmp_path / "curve.json").write_text("[]")
        with pytest.raises(GatelensError, match="should hold a JSON object"):
            load_curve(tmp_path)


def test_versions_name_what_numbers_depend_on() -> None:
    assert versions()["torch"] == torch.__version__
    assert {"gatelens", "torch", "transformers", "python"} <= set(versions())
