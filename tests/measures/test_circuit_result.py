"""Saved circuits: read as they were written, also those of version 0.1."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import CircuitSettings, GatelensError, find_circuit, load_circuit
from gatelens.gates import LEVELS

RESULTS = Path(__file__).parents[2] / "results"
SAVED = sorted(path.parent for path in RESULTS.glob("*-kept-smollm2/cells/*/result.json"))


@pytest.mark.parametrize("level", LEVELS)
def test_a_result_is_read_as_it_was_written(level: str, tmp_path: Path) -> None:
    settings = CircuitSettings(level=level, method="eap", points=4, random_points=3, sample=4, allow_noise=True)
    result = find_circuit(tiny("llama"), random_task(n=3, lengths=(5,)), settings, out=tmp_path, dense="dense-llama")
    again = load_circuit(tmp_path, scores=True)
    for name in ("model", "task", "settings", "validity", "seconds", "sparse", "dense", "graph", "count"):
        assert getattr(again, name) == getattr(result, name), name
    assert torch.equal(again.curve.metrics, result.curve.metrics)
    [ours], [theirs] = again.scores, result.scores
    for a, b in zip(ours.gate_sets(), theirs.gate_sets(), strict=True):
        assert torch.equal(a.scores, b.scores)
        assert torch.equal(a.exists, b.exists)
    assert json.loads((tmp_path / "result.json").read_text())["schema_version"] == 2


def test_an_answer_is_right_if_its_metric_is_above_0() -> None:
    settings = CircuitSettings(method="eap", points=2, random_points=0, sample=0, describe=0, allow_noise=True)
    result = find_circuit(tiny("llama"), random_task(n=4, lengths=(5,)), settings)
    result = replace(result, curve=replace(result.curve, everything=torch.tensor([[2.0, 0, -0.5, -3]])))
    assert result.answered == 0.25


@pytest.mark.parametrize("folder", SAVED, ids=[f"{path.parts[-3]}/{path.name}" for path in SAVED])
def test_results_of_earlier_versions_open(folder: Path) -> None:
    result = load_circuit(folder)
    assert result.settings.level in LEVELS
    assert result.curve.effect[-1] == pytest.approx(1, abs=1e-3)


def test_there_are_saved_results() -> None:
    assert len(SAVED) >= 16


def test_a_result_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(GatelensError, match="written by a newer version of gatelens"):
        load_circuit(tmp_path)
