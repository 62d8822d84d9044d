"""Folders of results: whole, continued, refused, damaged."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gatelens import GatelensError
from gatelens.measures.curve_files import load_curve, save_curve
from gatelens.measures.curves import Curve
from gatelens.runtime.files import read_tensors, write_json
from gatelens.runtime.versions import versions


def some_curve(random: bool = True) -> Curve:
    torch.manual_seed(0)
    metrics = torch.randn(2, 4, 5)
    curve = Curve(
        "edges", 9, [0, 1, 4, 9], torch.tensor([0, 0.5, 4, 9]), metrics, metrics[:, 0], metrics[:, -1], "signed", "zero"
    )
    return replace(curve, random=replace(curve, metrics=metrics + 1)) if random else curve


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
