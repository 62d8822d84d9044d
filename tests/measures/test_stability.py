"""Circuits of halves of the prompts: of known scores, and against circuits that are evaluated one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import tiny
from pieces import finish_in_pieces
from toys import planted, planted_task, random_task

from gatelens import CircuitSettings, attribute, find_circuit, load_circuit
from gatelens.gates import LEVELS
from gatelens.gates.heads import HeadScores
from gatelens.gates.scores import Scores
from gatelens.measures.stability import Stability, StabilityLine, measure_stability
from gatelens.measures.top_k import Circuits
from gatelens.measures.validity import overlap
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import halves


def with_templates(task: CircuitTask, n: int) -> CircuitTask:
    """The same prompts, of n templates in turn."""
    return replace(task, pairs=[replace(pair, template=f"t{i % n}") for i, pair in enumerate(task.pairs)])


def metric(model: object, task: CircuitTask, scores: Scores, ks: list[int]) -> torch.Tensor:
    """The metric of top-k circuits: (k, prompt)."""
    circuits = Circuits.of(model, task, scores)
    found = torch.empty(len(ks), len(task))
    for i, bucket in enumerate(circuits.batches):
        found[:, bucket.which] = circuits.metric(i, ks)
    return found


def run(level: str, task: CircuitTask, k: int, splits: int, context: Context | None = None) -> Stability:
    model = tiny("llama")

    def score(side: CircuitTask, context: Context) -> Scores:
        return attribute(LEVELS[level], model, side, context=context)

    def ranked(side: CircuitTask, scores: Scores, context: Context) -> Circuits:
        return Circuits.of(model, side, scores, context=context)

    return measure_stability(task, k, splits, score, ranked, context=context)


def test_transferred_effects_are_those_of_single_circuits() -> None:
    model, task, k = tiny("llama"), random_task(n=7, lengths=(4, 3)), 4
    [line] = run("heads", task, k, 1).lines
    sides = halves(task)
    scores = [attribute(LEVELS["heads"], model, side) for side in sides]
    assert line.overlap == line.overlap_low == line.overlap_high == overlap(scores, k, "absolute")
    for name, of in (("own", scores), ("transferred", scores[::-1])):
        rows = torch.cat([metric(model, side, own, [0, k, 12]) for side, own in zip(sides, of, strict=True)], 1)
        none, circuit, everything = rows.mean(1).tolist()
        assert getattr(line, name) == pytest.approx((circuit - none) / (everything - none), rel=1e-3, abs=1e-4)
    assert (line.other, line.prompts, line.splits) == ("prompts", 7, 1)


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_and_both_kinds_of_split(level: str) -> None:
    task = with_templates(random_task(n=6, lengths=(4, 3)), 4)
    stability = run(level, task, 5, 2)
    assert [line.other for line in stability.lines] == ["prompts", "templates"]
    for line in stability.lines:
        assert 0 <= line.overlap_low <= line.overlap <= line.overlap_high <= 1
        assert (line.transferred is None) == (not LEVELS[level].shared)


def test_equal_rankings_overlap_and_transfer_fully() -> None:
    """The planted heads are the best on every half."""
    model, task = planted(), with_templates(planted_task(n=8), 2)
    scores = HeadScores(torch.tensor([[0.0, 0, 3, 0], [0, 2, 0, 0]]), "by hand")
    stability = measure_stability(
        task, 2, 3, lambda side, context: scores, lambda side, own, context: Circuits.of(model, side, own)
    )
    for line in stability.lines:
        assert (line.overlap, line.overlap_low) == (1, 1)
        assert line.own == line.transferred == pytest.approx(1, abs=0.1)
        assert line.transferred_low <= line.transferred <= line.transferred_high


def test_a_killed_run_resumes(tmp_path: Path) -> None:
    """Stopped at each piece in turn, every piece is computed once, and the numbers are the same."""
    task = random_task(n=4, lengths=(4,))
    found, written = finish_in_pieces(lambda: run("heads", task, 3, 1, Context.in_folder(tmp_path)), starts=40)
    assert found == run("heads", task, 3, 1)
    assert len(written) == len(set(written)) >= 4


def test_what_tables_print() -> None:
    ends = {"own_low": 0.8, "own_high": 1.0, "transferred_low": None, "transferred_high": None}
    line = StabilityLine(
        other="prompts", splits=3, prompts=64, overlap=0.5, overlap_low=0.4, overlap_high=0.6, own=0.9, transferred=0.7,
        **ends,
    )  # fmt: skip
    assert line.shown == ("0.50 (0.40 to 0.60)", "0.90 (0.80 to 1.00)", "0.70 (no interval)", "64 prompts, 3 splits")


@pytest.mark.parametrize("level", LEVELS)
def test_is_saved_with_the_circuit(level: str, tmp_path: Path) -> None:
    few = {"method": "eap", "points": 4, "random_points": 2, "sample": 0, "describe": 0, "areas": "none"}
    settings = CircuitSettings(level=level, stability=1, threshold=0.5, allow_noise=True, **few)
    result = find_circuit(tiny("llama"), random_task(n=4, lengths=(4,)), settings, out=tmp_path / "out")
    assert result.stability is not None
    assert load_circuit(tmp_path / "out").stability == result.stability
    assert len((tmp_path / "out" / "stability.csv").read_text().splitlines()) == 1 + len(result.stability.lines) == 2
    assert "stability" not in settings.replace(stability=0).identity()
