"""What holds for every registered method: it can be killed and resumed, and its scores can be ranked and saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import Context, GatelensError, Scores, score_gates
from gatelens.gates import LEVELS
from gatelens.methods.registry import methods
from gatelens.model.graph import Graph

FEW: dict[str, dict[str, object]] = {  # settings that make a method fast
    "eap-ig-activations": {"steps": 2},
    "edge-pruning": {"updates": 3, "warm_start": 1},
    "ugs": {"updates": 3, "warm_start": 1},
}
CASES = [(name, next(level for level in LEVELS if method.works_on(level))) for name, method in methods().items()]


class Killed(Exception):
    """Raised by the progress of a run, as Ctrl-C would be."""


def numbers(scores: Scores) -> torch.Tensor:
    return torch.cat([gate_set.scores[gate_set.exists] for gate_set in scores.gate_sets()])


@pytest.mark.parametrize(("name", "level"), CASES)
def test_a_killed_run_resumes_with_the_same_numbers(name: str, level: str, tmp_path: Path) -> None:
    model, task = tiny("llama", num_hidden_layers=2), random_task(n=3, lengths=(3, 4))
    settings = FEW.get(name, {})

    def kill(title: str, done: int, total: int) -> None:
        if done == 1 and total > 1:
            raise Killed

    def run(folder: Path, progress: object = None) -> Scores:
        context = Context.in_folder(folder, memory_gb=1e-9, progress=progress)  # one prompt or row at a time
        return score_gates(level, model, task, name, context=context, **settings)

    whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "killed", kill)
    pieces = {path: path.stat().st_mtime_ns for path in (tmp_path / "killed").iterdir()}
    assert pieces
    resumed = run(tmp_path / "killed")
    assert torch.equal(numbers(resumed), numbers(whole))
    assert {path: path.stat().st_mtime_ns for path in pieces} == pieces  # they were read, not computed again
    assert torch.isfinite(numbers(whole)).all()
    again = LEVELS[level].read_scores(whole.tensors(), Graph.of(model.anatomy), whole.method)
    assert [gate.name for gate in again.top(3)] == [gate.name for gate in whole.top(3)]


def test_a_wrong_level_or_setting_is_one_sentence() -> None:
    model, task = tiny("llama"), random_task(n=1)
    with pytest.raises(GatelensError, match="no level 'edge'"):
        score_gates("edge", model, task)
    with pytest.raises(GatelensError, match="steps is 0: it must be at least 1"):
        score_gates("heads", model, task, "eap-ig-activations", steps=0)
