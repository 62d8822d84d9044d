"""What speaks for a circuit: against scipy, and by hand."""

from __future__ import annotations

import pytest
import scipy.stats
import torch
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import linear, planted, planted_task, random_task

from gatelens import explained_effect
from gatelens.gates.attention import AttentionScores
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.measures.top_k import Circuits
from gatelens.measures.validity import agreement_with_patching, complement_effect, jaccard, overlap, rank_correlation
from gatelens.methods.attribution import attribute_attention, attribute_edges, attribute_heads
from gatelens.model.graph import Graph

FEW = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=12)


def spearman(a: list[float], b: list[float]) -> float:
    """Pearson's correlation of ranks, where equal values share the mean of theirs."""

    def ranks(values: list[float]) -> torch.Tensor:
        below = [sum(other < value for other in values) for value in values]
        return torch.tensor([n + (values.count(value) - 1) / 2 for n, value in zip(below, values, strict=True)])

    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]).double())[0, 1])


class TestRankCorrelation:
    @given(FEW)
    @settings(deadline=None, max_examples=60)
    def test_is_spearmans_also_with_ties(self, pairs: list[tuple[int, int]]) -> None:
        a, b = map(list, zip(*pairs, strict=True))
        if len(set(a)) == 1 or len(set(b)) == 1:
            return  # no ranking to compare
        found = rank_correlation(torch.tensor(a).float(), torch.tensor(b).float())
        assert found == pytest.approx(spearman(a, b), abs=1e-9)
        assert found == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-9)

    def test_of_floats(self) -> None:
        a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
        assert rank_correlation(a, b) == pytest.approx(spearman(a.tolist(), b.tolist()))
        assert rank_correlation(a, -a.exp()) == pytest.approx(-1)


class TestAgreement:
    @pytest.mark.parametrize("attribute", [attribute_heads, attribute_edges, attribute_attention])
    def test_is_perfect_on_a_linear_model(self, attribute: object) -> None:
        """Heads and edges of 30 gates; of attention edges, 30 over all prompts."""
        model, task = linear("llama"), random_task(n=3, lengths=(5, 4))
        correlation, sampled = agreement_with_patching(model, task, attribute(model, task), 30)
        assert sampled == (12 if attribute is attribute_heads else 30)
        # The idle q and k edges of this model differ from zero by rounding only, and so have no order.
        assert correlation > (0.7 if attribute is attribute_edges else 0.98)

    def test_is_small_for_random_scores(self) -> None:
        model, task = tiny("llama"), random_task(n=2, lengths=(5,))
        scores = HeadScores(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "by hand")
        assert abs(agreement_with_patching(model, task, scores, 12)[0]) < 0.6


def test_the_complement_of_the_planted_circuit_does_nothing() -> None:
    model, task = planted(), planted_task()
    scores = attribute_edges(model, task, steps=8)
    curve, circuits = explained_effect(model, task, scores), Circuits.of(model, task, scores)
    assert complement_effect(circuits, curve, 5) == pytest.approx(0, abs=0.02)
    assert complement_effect(circuits, curve, 0) == pytest.approx(1, abs=1e-4)
    assert complement_effect(circuits, curve, curve.total) == pytest.approx(0, abs=1e-4)


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
