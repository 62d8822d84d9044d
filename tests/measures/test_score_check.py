"""Scores against exact patching: the sample, the correlation and its interval, against scipy and by hand."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import scipy.stats
import torch
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import linear, random_task

from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.gates.heads import HeadScores
from gatelens.gates.level import Level
from gatelens.gates.scores import Scores
from gatelens.measures.score_check import (
    LEAST_GATES,
    Agreement,
    check_scores,
    correlation_interval,
    rank_correlation,
    stratified,
)
from gatelens.measures.validity import Validity
from gatelens.methods.attribution import attribute_attention, attribute_edges, attribute_heads
from gatelens.methods.patching import patch

FEW = st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=3, max_size=12)
RESULTS = Path(__file__).parents[2] / "results"


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
        correlation = rank_correlation(torch.tensor(a).float(), torch.tensor(b).float())
        if len(set(a)) == 1 or len(set(b)) == 1:  # equal numbers have no ranking
            assert math.isnan(correlation)
        else:
            assert correlation == pytest.approx(spearman(a, b), abs=1e-9)
            assert correlation == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-9)

    def test_of_floats(self) -> None:
        a, b = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
        assert rank_correlation(a, b) == pytest.approx(spearman(a.tolist(), b.tolist()))
        assert rank_correlation(a, -a.exp()) == pytest.approx(-1)

    def test_equal_scores_have_none(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of scipy, about the constant
            assert math.isnan(rank_correlation(torch.ones(20), torch.randn(20)))
            assert math.isnan(rank_correlation(torch.randn(20), torch.ones(20)))
            assert math.isnan(rank_correlation(torch.randn(1), torch.randn(1)))


class TestInterval:
    def test_a_monotone_relation_has_no_width(self) -> None:
        a = torch.randn(40, generator=torch.Generator().manual_seed(0))
        assert correlation_interval(a, a.exp(), torch.zeros(40)) == pytest.approx((1, 1))
        assert correlation_interval(a, -a, torch.arange(40) % 3) == pytest.approx((-1, -1))

    def test_is_near_the_interval_of_fishers_transformation(self) -> None:
        """Of normal pairs with a true correlation of 0.6."""
        x, noise = torch.randn(2, 400, generator=torch.Generator().manual_seed(1))
        y = 0.6 * x + 0.8 * noise
        rho = rank_correlation(x, y)
        half = 1.96 * ((1 + rho**2 / 2) / 397) ** 0.5
        expected = torch.tanh(torch.tensor(rho).atanh() + torch.tensor([-half, half]))
        assert correlation_interval(x, y, torch.zeros(400)) == pytest.approx(expected.tolist(), abs=0.03)

    def test_gates_are_drawn_inside_their_strata(self) -> None:
        """Two strata that are far apart: no draw can leave one of them out, so that even the worst draw is high."""
        a = torch.cat([torch.zeros(10), torch.ones(10)])
        low, high = correlation_interval(a, a, a.long())
        assert (low, high) == pytest.approx((1, 1))
        # Drawn alone, a stratum has equal scores only.
        assert correlation_interval(a[:10], a[:10], torch.zeros(10)) == (None, None)


class TestSample:
    @given(st.integers(1, 300), st.integers(1, 80), st.integers(0, 5))
    @settings(deadline=None, max_examples=80)
    def test_has_this_many_different_gates(self, total: int, n: int, seed: int) -> None:
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(seed))[:total]
        strata = stratified(order, n, seed)
        together = torch.cat(list(strata.values())).tolist()
        assert len(together) == len(set(together)) == min(n, total)
        assert set(together) <= set(order.tolist())
        sizes = [len(places) for places in strata.values()]
        assert max(sizes) - min(sizes) <= 1
        assert strata["top"].tolist() == order[: sizes[0]].tolist()

    def test_ranks_of_the_middle_are_spaced_by_their_logarithm(self) -> None:
        middle = stratified(torch.arange(100_000), 30, 0)["middle"]
        steps = middle[1:] / middle[:-1]
        assert steps.tolist() == pytest.approx([10_000 ** (1 / 10)] * 9, rel=0.02)
        assert (middle > 10).all()

    def test_the_seed_decides_the_random_gates_only(self) -> None:
        one, same, other = (stratified(torch.arange(5000), 60, seed) for seed in (1, 1, 2))
        for name in ("top", "middle"):
            assert torch.equal(one[name], other[name])
        assert torch.equal(one["random"], same["random"])
        assert not torch.equal(one["random"], other["random"])


@pytest.mark.parametrize("level", [HEADS, EDGES, ATTENTION])
def test_given_gates_are_patched_as_among_all(level: Level) -> None:
    model, task = tiny("llama"), random_task(n=2, lengths=(3, 2))
    whole = patch(level, model, task)
    places = [order[i:9:2] for i, order in enumerate(whole.orders())]
    some = patch(level, model, task, gates=places)
    assert some.is_sample
    for chosen, gate_set, every in zip(places, some.gate_sets(), whole.gate_sets(), strict=True):
        assert gate_set.exists.flatten().nonzero()[:, 0].tolist() == chosen.sort().values.tolist()
        torch.testing.assert_close(
            gate_set.scores.flatten()[chosen], every.scores.flatten()[chosen], atol=1e-6, rtol=1e-4
        )


class TestCheck:
    @pytest.mark.parametrize("attribute", [attribute_heads, attribute_edges, attribute_attention])
    def test_is_perfect_on_a_linear_model(self, attribute: Callable[..., Scores]) -> None:
        model, task = linear("llama"), random_task(n=3, lengths=(5, 4))
        check = check_scores(model, task, attribute(model, task), 30)
        assert check.overall.checked_prompts == 3
        if attribute is attribute_heads:  # 12 heads are too few for a correlation
            assert (check.overall.correlation, check.overall.sampled) == (None, 12)
            return
        assert check.overall.sampled == 30
        # 30 gates that all prompts share, or 10 of each prompt: 4 of the top, 3 of the middle, 3 of the rest.
        sizes = [12, 9, 9] if attribute is attribute_attention else [10, 10, 10]
        assert [stratum.sampled for stratum in check.strata] == sizes
        # The idle q and k edges of this model differ from zero by rounding only, and so have no order.
        assert check.overall.correlation > (0.7 if attribute is attribute_edges else 0.98)
        assert check.overall.correlation_low <= check.overall.correlation <= check.overall.correlation_high

    def test_is_that_of_the_sampled_gates(self) -> None:
        """Of all 24 heads of a model, against scipy; 8 of each stratum are too few for a correlation."""
        model, task = tiny("llama", num_hidden_layers=6), random_task(n=2, lengths=(5,))
        scores = HeadScores(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), "by hand")
        check = check_scores(model, task, scores, 99)
        exact = patch(HEADS, model, task).scores
        expected = scipy.stats.spearmanr(scores.scores.flatten(), exact.flatten()).statistic
        assert check.overall.correlation == pytest.approx(expected, abs=1e-6)
        assert check.overall.sampled == 24
        assert [(stratum.stratum, stratum.sampled, stratum.correlation) for stratum in check.strata] == [
            ("top", 8, None),
            ("middle", 8, None),
            ("random", 8, None),
        ]


class TestShown:
    def test_with_interval_and_sizes(self) -> None:
        agreement = Agreement(
            correlation=0.774, correlation_low=0.61, correlation_high=0.88, sampled=64, checked_prompts=8
        )
        assert agreement.shown == "0.77 (0.61 to 0.88; 64 gates, 8 prompts)"
        assert Agreement(correlation=0.5, sampled=16).shown == "0.50 (no interval; 16 gates)"
        assert Agreement().shown == "-"
        assert Agreement(sampled=20).shown == "- (all scores are equal; 20 gates)"

    @pytest.mark.parametrize("sampled", range(1, LEAST_GATES))
    def test_no_correlation_of_a_few_gates(self, sampled: int) -> None:
        agreement = Agreement(correlation=0.77, correlation_low=0.6, correlation_high=0.9, sampled=sampled)
        assert agreement.correlation is agreement.correlation_low is agreement.correlation_high is None
        assert agreement.shown == f"- ({sampled} gates; a correlation needs 16)"

    def test_saved_results_of_a_few_gates(self) -> None:
        saved = sorted(RESULTS.glob("edges-kept-smollm2/cells/*/result.json"))
        assert saved
        for path in saved:
            validity = json.loads(path.read_text())["validity"]
            assert (Validity(**validity).correlation is None) == (validity["sampled"] < LEAST_GATES)
