"""Gates that are ranked on some prompts and evaluated on others."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import CircuitSettings, GatelensError, Model, attribute_heads, explained_effect, find_circuit
from gatelens.cli.tables import circuit_table
from gatelens.measures.circuit_result import load_circuit
from gatelens.measures.pairing import dense_circuit_of
from gatelens.tasks import task as make_task
from gatelens.tasks.batches import hold_out

SETTINGS = CircuitSettings(
    n=4,
    held_out=True,
    method="eap-ig",
    steps=2,
    points=5,
    random_points=3,
    sample=0,
    refine=0,
    describe=0,
    allow_noise=True,
)


def test_is_the_curve_of_scores_on_other_prompts(trained: Model) -> None:
    """By hand: eight prompts, four of which are ranked on."""
    result = find_circuit(trained, "induction", SETTINGS, options={"length": 5})
    ranked, evaluated = hold_out(make_task("induction", trained, n=8, seed=0, length=5), 4)
    scores = attribute_heads(trained, ranked, steps=2)
    curve = explained_effect(trained, evaluated, scores, SETTINGS, ranked_on=4)
    assert torch.equal(result.scores[0].scores, scores.scores)
    assert torch.equal(result.curve.metrics, curve.metrics)
    assert result.curve.fingerprints == (evaluated.fingerprint(),)
    assert result.settings.n == 4
    assert str(result.count.sample) == str(curve.sample) == "4 held-out prompts"
    same = find_circuit(trained, evaluated, SETTINGS.replace(held_out=False))
    assert not torch.equal(result.scores[0].scores, same.scores[0].scores)
    assert str(same.count.sample) == "4 prompts"


def test_every_file_and_table_says_so(trained: Model, tmp_path: Path) -> None:
    result = find_circuit(trained, "induction", SETTINGS.replace(seeds=2), out=tmp_path, options={"length": 5})
    assert json.loads((tmp_path / "result.json").read_text())["ranked_on"] == 4
    with (tmp_path / "curve.csv").open() as opened:
        lines = list(csv.DictReader(opened))
    assert {(line["prompts"], line["seeds"], line["ranked_on"]) for line in lines} == {("4", "2", "4")}
    assert len(json.loads((tmp_path / "asked.json").read_text())["task"]["ranked_on"]) == 2
    assert load_circuit(tmp_path).count == result.count
    assert str(load_circuit(tmp_path).count.sample) == "2 seeds of 4 held-out prompts"
    cells = [str(cell) for column in circuit_table(result).columns for cell in column.cells]
    assert "absolute score on 4 other prompts of each seed" in cells


def test_attention_edges_are_ranked_in_their_own_prompt(trained: Model) -> None:
    settings = SETTINGS.replace(level="attention", method="eap")
    result = find_circuit(trained, "induction", settings, options={"length": 5})
    assert result.curve.ranked_on == 0
    assert result.curve.fingerprints == (make_task("induction", trained, n=4, seed=0, length=5).fingerprint(),)


def test_a_given_task_is_cut_in_half() -> None:
    result = find_circuit(tiny("llama"), random_task(n=5, lengths=(5,)), SETTINGS)
    assert (result.curve.sample.prompts, result.curve.ranked_on) == (2, 3)


@pytest.mark.parametrize("n", [1, 2])
def test_too_few_different_prompts(n: int) -> None:
    task = random_task(n=n, lengths=(5,))
    pairs = [replace(pair, clean="the same") for pair in task.pairs]
    with pytest.raises(GatelensError, match=r"too few different prompts \(1\) to rank .*: ask for fewer"):
        find_circuit(tiny("llama"), replace(task, pairs=pairs), SETTINGS)


def test_a_circuit_is_compared_with_one_that_was_ranked_alike(trained: Model) -> None:
    def circuit(model: str, **changes: Any) -> Any:
        settings = SETTINGS.replace(**changes)
        return replace(find_circuit(trained, "induction", settings, options={"length": 5}), model=model)

    sparse = replace(circuit("sparse"), dense="dense")
    dense, other = circuit("dense"), circuit("dense", held_out=False)
    assert dense_circuit_of(sparse, [other, dense]) is dense
    assert dense_circuit_of(sparse, [other]) is None
