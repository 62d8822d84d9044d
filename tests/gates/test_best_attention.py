"""The best attention edges that a report reads, against the scores of all edges."""

from __future__ import annotations

import copy

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import GatelensError, attribute, explained_effect
from gatelens.gates import ATTENTION
from gatelens.gates.attention import AttentionScores
from gatelens.gates.best_attention import BestAttentionScores
from gatelens.sparse.in_model import make_sparse

TASK = random_task(n=5, lengths=(4, 6))


@pytest.fixture(scope="module", params=["dense", "sparse"])
def scores(request: pytest.FixtureRequest) -> AttentionScores:
    model = copy.deepcopy(tiny("llama"))
    if request.param == "sparse":
        make_sparse(model.hf, -2.0)
    return attribute(ATTENTION, model, TASK, steps=1)


def test_has_the_best_edges_of_every_prompt(scores: AttentionScores) -> None:
    best = BestAttentionScores.of(scores, most=7)
    for all_edges, few in zip(scores.gate_sets(), best.gate_sets(), strict=True):
        ranked = sorted(all_edges.scores[all_edges.exists].abs().tolist(), reverse=True)
        assert sorted(few.scores[few.exists].abs().tolist(), reverse=True) == ranked[:7]
        assert torch.equal(few.scores[few.exists], all_edges.scores[few.exists])
        assert not (few.exists & ~all_edges.exists).any()
    assert best.top(7) == scores.top(7)


def test_has_the_sum_over_all_edges_of_a_head(scores: AttentionScores) -> None:
    assert torch.equal(BestAttentionScores.of(scores, most=1).by_head(), scores.by_head())


def test_prompts_with_fewer_edges_have_all_of_them(scores: AttentionScores) -> None:
    best = BestAttentionScores.of(scores, most=10**6)
    for all_edges, few in zip(scores.gate_sets(), best.gate_sets(), strict=True):
        assert torch.equal(few.exists, all_edges.exists)
        assert torch.equal(few.scores, all_edges.scores.where(all_edges.exists, 0))


def test_is_read_as_it_was_written(scores: AttentionScores) -> None:
    best = BestAttentionScores.of(scores, most=7)
    again = ATTENTION.read_scores(best.tensors(), None, scores.method)  # type: ignore[arg-type]
    assert again.top(20) == best.top(20)
    assert torch.equal(again.by_head(), best.by_head())
    assert again.method == scores.method


def test_circuits_are_not_ranked_by_it(scores: AttentionScores) -> None:
    with pytest.raises(GatelensError, match="score all gates"):
        explained_effect(tiny("llama"), TASK, BestAttentionScores.of(scores))
