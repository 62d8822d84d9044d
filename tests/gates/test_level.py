"""What all levels have in common: rankings, names, saving, costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import Context, GatelensError
from gatelens.gates import ATTENTION, EDGES, HEADS, LEVELS, ROLE_EDGES, level_named
from gatelens.gates.attention import AttentionEdge, AttentionScores
from gatelens.gates.level import Level, log_grid, top_masks
from gatelens.gates.scores import Scores
from gatelens.methods.attribution import attribute
from gatelens.methods.patching import patch
from gatelens.model.components import Head
from gatelens.model.graph import Graph

MODEL = tiny("llama")
TASK = random_task(n=3, lengths=(5, 4))
every_level = pytest.mark.parametrize("level", LEVELS.values(), ids=list(LEVELS))


def test_a_level_that_does_not_exist_is_one_sentence() -> None:
    with pytest.raises(GatelensError, match=r"no level 'edge': did you mean 'edges'\? There are heads, edges"):
        level_named("edge")


@every_level
def test_scores_are_saved_and_read_again(level: Level[Any]) -> None:
    scores = attribute(level, MODEL, TASK)
    again = level.read_scores(scores.tensors(), Graph.of(MODEL.anatomy), scores.method)
    assert again.method == scores.method
    for ours, theirs in zip(scores.gate_sets(), again.gate_sets(), strict=True):
        for name, numbers, saved in zip(ours._fields, ours, theirs, strict=True):
            assert (numbers is None) == (saved is None), name
            assert numbers is None or torch.equal(numbers, saved), name


@pytest.mark.parametrize("level", [HEADS, EDGES, ROLE_EDGES], ids=lambda level: level.name)
def test_a_saved_sample_stays_a_sample(level: Level[Any]) -> None:
    sample = patch(level, MODEL, TASK, sample=3)
    again = level.read_scores(sample.tensors(), Graph.of(MODEL.anatomy), sample.method)
    assert again.is_sample
    assert int(again.gate_sets()[0].exists.sum()) == 3


@every_level
def test_the_top_of_a_ranking_has_gates_names_and_scores(level: Level[Any]) -> None:
    scores = attribute(level, MODEL, TASK)
    top = scores.top(7)
    values = torch.cat([gate_set.scores[gate_set.exists] for gate_set in scores.gate_sets()])
    assert [abs(gate.score) for gate in top] == pytest.approx(values.abs().sort(descending=True).values[:7].tolist())
    assert len({gate.name for gate in top}) == 7
    signed = scores.top(3, "signed")
    assert [gate.score for gate in signed] == pytest.approx(values.sort(descending=True).values[:3].tolist())


def test_an_attention_edge_is_named_by_prompt_head_query_and_key() -> None:
    scores = [torch.zeros(2, 3, 4, 5, 5), torch.zeros(1, 3, 4, 4, 4)]
    scores[1][0, 2, 1, 3, 0] = -1.0
    edges = [torch.ones_like(part, dtype=torch.bool) for part in scores]
    [gate] = AttentionScores(scores, edges, "by hand").top(1)
    assert gate == (AttentionEdge(2, Head(2, 1), 3, 0), "prompt 2: L2H1, query 3 <- key 0", -1.0)


@every_level
def test_membership_counts_the_top_k(level: Level[Any]) -> None:
    scores = attribute(level, MODEL, TASK)
    assert scores.membership(6, scores.orders()).sum() == pytest.approx(6)
    assert scores.membership(0, scores.orders()).sum() == 0


@every_level
def test_the_number_of_gates_is_that_of_the_gate_sets(level: Level[Any]) -> None:
    scores = attribute(level, MODEL, TASK)
    graph = Graph.of(MODEL.anatomy)
    prompts = [bucket.clean.shape[1] for bucket in TASK.buckets for _ in range(len(bucket))]
    lengths = prompts if not level.shared else prompts[:1]
    counts = [int(gate_set.exists.sum()) for gate_set in scores.gate_sets()]
    assert counts == [level.on(TASK).n_gates(graph, length) for length in lengths]


@every_level
def test_denoising_opens_one_gate_in_the_corrupt_run(level: Level[Any]) -> None:
    """By hand: the corrupt run with one gate at the clean value gains the score."""
    task = random_task(n=2, lengths=(4,))
    [bucket] = task.buckets
    level = level.on(task, bucket)
    scores = patch(level, MODEL, task, "denoising")
    clean, corrupt = level.capture(MODEL, bucket.clean), level.capture(MODEL, bucket.corrupt)
    shape = level.shape(MODEL, 4)
    number, position = 0, int(scores.orders()[0][0])
    gates = torch.ones(torch.Size(shape).numel())
    gates[position] = 0
    rows = gates.view(1, *shape) if level.shared else gates.view(1, 1, *shape).expand(1, 2, *shape)
    logits = level.run(MODEL, bucket.corrupt, rows, level.reads(clean), context=Context())
    gained = (task.metric(logits, bucket) - task.metric(corrupt.logits, bucket))[0]
    wanted = gained.mean() if level.shared else gained[0]
    value = scores.gate_sets()[number].scores.flatten()[position]
    assert abs(float(value)) > 1e-4
    assert float(value) == pytest.approx(float(wanted), rel=1e-4, abs=1e-5)


@every_level
def test_a_source_that_a_level_does_not_have(level: Level[Any]) -> None:
    with pytest.raises(GatelensError, match=f"no source 'noise' for {level.noun}"):
        level.check_source("noise")  # type: ignore[arg-type]


def test_only_attention_edges_have_no_mean() -> None:
    assert "mean" in HEADS.sources
    assert "mean" in EDGES.sources
    with pytest.raises(GatelensError, match="attention edges have no mean"):
        ATTENTION.mean(MODEL, [])


def test_scores_by_head_belong_to_heads_only() -> None:
    scores: dict[str, Scores] = {name: attribute(level, MODEL, TASK) for name, level in LEVELS.items()}
    heads = scores["heads"].by_head()
    attention = scores["attention"].by_head()
    assert scores["edges"].by_head() is None
    assert heads is not None
    assert attention is not None
    # To first order, closing all edges of a head closes the head.
    torch.testing.assert_close(attention, heads, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("total", "points"), [(70_651, 32), (10, 32), (1, 2), (100, 5), (0, 32)])
def test_a_logarithmic_grid_runs_from_nothing_to_everything(total: int, points: int) -> None:
    grid = log_grid(total, points)
    assert grid == sorted(set(grid))
    assert (grid[0], grid[-1]) == (0, total)
    assert len(grid) <= points + 1


def test_masks_of_the_top_and_of_the_rest() -> None:
    order = torch.tensor([4, 0, 2])  # positions 1 and 3 are not gates
    masks = top_masks(order, [0, 2, 9], 5, complement=False)
    assert masks.tolist() == [[False] * 5, [True, False, False, False, True], [True, False, True, False, True]]
    assert top_masks(order, [2], 5, complement=True).tolist() == [[False, False, True, False, False]]
