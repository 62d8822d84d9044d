"""What speaks for a circuit: the effect of the rest, and the overlap between seeds, by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from toys import planted, planted_task

from gatelens import Context, explained_effect
from gatelens.gates.attention import AttentionScores
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.measures.top_k import Circuits
from gatelens.measures.validity import complement_effect, jaccard, overlap
from gatelens.methods.attribution import attribute_edges
from gatelens.model.graph import Graph


def test_the_complement_of_the_planted_circuit_does_nothing() -> None:
    model, task = planted(), planted_task()
    scores = attribute_edges(model, task, steps=8)
    curve, circuits = explained_effect(model, task, scores), Circuits.of(model, task, scores)
    assert complement_effect(circuits, curve, 5) == pytest.approx(0, abs=0.02)
    assert complement_effect(circuits, curve, 0) == pytest.approx(1, abs=1e-4)
    assert complement_effect(circuits, curve, curve.total) == pytest.approx(0, abs=1e-4)


def test_complements_of_several_sizes_do_not_meet_in_a_folder(tmp_path: Path) -> None:
    model, task = planted(), planted_task()
    scores = attribute_edges(model, task, steps=8)
    curve, circuits = explained_effect(model, task, scores), Circuits.of(model, task, scores)
    saved = Circuits.of(model, task, scores, context=Context.in_folder(tmp_path))
    for k in (0, 5, curve.total):
        assert complement_effect(saved, curve, k) == complement_effect(circuits, curve, k)


class TestOverlap:
    def test_jaccard(self) -> None:
        a, b = torch.tensor([1.0, 1, 1, 0]), torch.tensor([0.0, 1, 1, 1])
        assert jaccard(a, b) == 0.5
        assert jaccard(a, a) == 1
        assert jaccard(a, 1 - a) == 0
        assert jaccard(torch.zeros(4), torch.zeros(4)) == 0

    def heads(self, *values: float) -> HeadScores:
        return HeadScores(torch.tensor(values).view(2, -1), "by hand")

    def test_of_heads(self) -> None:
        a, b, c = self.heads(3, 2, 1, 0), self.heads(-3, 0, 2, 1), self.heads(0, 0, 3, -2)
        assert overlap([a], 2, "absolute") is None
        assert overlap([a, b], 2, "absolute") == pytest.approx(1 / 3)
        assert overlap([a, b], 2, "signed") == 0
        assert overlap([a, b, c], 2, "absolute") == pytest.approx((1 / 3 + 0 + 1 / 3) / 3)

    def test_what_is_no_edge_is_in_no_top_k(self) -> None:
        """By signed score, zeros where there is no edge would stand before all that harms."""
        graph = Graph(2, 2, 2)
        torch.manual_seed(0)
        a, b = (EdgeScores(-torch.rand(graph.edges.shape) * graph.edges, graph, "by hand") for _ in range(2))
        found = overlap([a, b], 10, "signed")
        tops = [{name for _, name, _ in scores.top(10, "signed")} for scores in (a, b)]
        assert found == pytest.approx(len(tops[0] & tops[1]) / len(tops[0] | tops[1]))

    def test_attention_edges_are_counted_by_head(self) -> None:
        def scores(*top: tuple[int, int, int, int]) -> AttentionScores:
            values = torch.full((1, 2, 2, 3, 3), 0.1).tril()
            for place in top:
                values[(0, *place)] = 1
            return AttentionScores([values], [values != 0], "by hand")

        a = scores((0, 0, 1, 0), (0, 0, 2, 1), (1, 1, 2, 2))  # head L0H0 twice, L1H1 once
        b = scores((0, 0, 2, 0), (1, 0, 1, 1), (1, 1, 0, 0))
        assert overlap([a, b], 3, "absolute") == pytest.approx(2 / 4)
        assert overlap([a, a], 3, "absolute") == 1
