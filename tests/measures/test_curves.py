"""Curves of made-up metrics, computed by hand; and their ends for every family and granularity."""

from __future__ import annotations

import itertools

import pytest
import torch
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import random_task

from gatelens import CurveSettings, GatelensError, Model, explained_effect, multiplier
from gatelens.gates import EDGES, HEADS, LEVELS
from gatelens.gates.heads import HeadScores
from gatelens.measures.curves import Curve, edges_effect, pool
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute_attention, attribute_edges, attribute_heads
from gatelens.runtime.context import Context
from gatelens.tasks import task as make_task


def made_up(effects: list[float], kept: list[float] | None = None, level: str = "heads") -> Curve:
    """A curve of one prompt, whose metric is -1 with nothing kept and 3 with everything."""
    effect = torch.tensor([0.0, *effects, 1.0])
    metrics = (4 * effect - 1)[None, :, None]
    places = torch.arange(len(effect)).float() if kept is None else torch.tensor([0.0, *kept])
    return Curve(level, 99, list(range(len(effect))), places, metrics, metrics[:, 0], metrics[:, -1])


class TestEffect:
    def test_is_a_ratio_of_means_over_prompts(self) -> None:
        none, everything = torch.tensor([[1.0, -1.0]]), torch.tensor([[2.0, 4.0]])
        metrics = torch.stack([none, torch.tensor([[1.5, 0.0]]), everything], 1)
        curve = Curve("heads", 2, [0, 1, 2], torch.arange(3.0), metrics, none, everything)
        # (0.75 - 0) / (3 - 0), and not the mean of 0.5 and 0.2
        assert curve.effect.tolist() == pytest.approx([0, 0.25, 1])

    def test_several_seeds_count_alike(self) -> None:
        a, b = made_up([0.2]), made_up([0.6])
        b = Curve(b.level, b.total, b.asked, b.kept + 2, 10 * b.metrics, 10 * b.none, 10 * b.everything)
        both = pool([a, b])
        assert both.effect.tolist() == pytest.approx([0, 0.4, 1])
        assert both.kept.tolist() == [1, 2, 3]
        assert both.none.shape == (2, 1)

    def test_curves_over_other_grids_are_not_pooled(self) -> None:
        with pytest.raises(GatelensError, match="same grid"):
            pool([made_up([0.2]), made_up([0.2, 0.3])])


class TestCountAt:
    @pytest.mark.parametrize(
        ("effects", "count"),
        [
            ([0.2, 0.95, 0.96], 2),  # there and stays
            ([0.95, 0.5, 0.95, 0.97], 3),  # a first visit that does not stay
            ([0.95, 0.91, 0.5, 0.92], 1),  # the next point is enough
            ([0.5, 0.6], 3),  # only the whole model
            ([0.9, 0.9], 1),  # the threshold itself counts
            ([1.3, 1.2], 1),
        ],
    )
    def test_by_hand(self, effects: list[float], count: float) -> None:
        assert made_up(effects).count_at(0.9) == count

    def test_counts_what_is_really_kept(self) -> None:
        assert made_up([0.2, 0.95, 0.96], kept=[0, 7, 8, 20]).count_at(0.9) == 7

    def test_a_curve_that_never_gets_there(self) -> None:
        curve = made_up([0.5])
        short = Curve("heads", 9, [0, 1], curve.kept[:2], curve.metrics[:, :2], curve.none, curve.everything)
        assert short.count_at(0.9) is None
        with pytest.raises(GatelensError, match=r"does not reach 0\.9"):
            multiplier(short, curve)


class TestMultiplier:
    def test_is_dense_over_sparse(self) -> None:
        dense, sparse = made_up([0.1, 0.2, 0.3, 0.95]), made_up([0.1, 0.95])
        assert multiplier(dense, sparse) == 2.0
        assert multiplier(sparse, dense) == 0.5
        assert multiplier(dense, sparse, at=0.05) == 1.0

    def test_of_two_levels(self) -> None:
        with pytest.raises(GatelensError, match="heads and a curve of edges"):
            multiplier(made_up([0.5]), made_up([0.5], level="edges"))


class TestBand:
    def test_one_seed_is_a_bootstrap_over_prompts(self) -> None:
        torch.manual_seed(0)
        none, everything = torch.randn(1, 12) - 2, torch.randn(1, 12) + 2
        metrics = torch.stack([none, torch.randn(1, 12), everything], 1)
        curve = Curve("heads", 2, [0, 1, 2], torch.arange(3.0), metrics, none, everything)
        draws = []
        for _ in range(4000):
            which = torch.randint(12, (12,))
            draws.append((metrics[0, 1] - none[0])[which].mean() / (everything - none)[0][which].mean())
        wanted = torch.stack(draws).quantile(torch.tensor([0.025, 0.975]))
        found = torch.stack([curve.low[1], curve.high[1]])
        torch.testing.assert_close(found, wanted, atol=0.1 * float(wanted.diff()), rtol=0)
        assert curve.low[1] < curve.effect[1] < curve.high[1]
        for band in (curve.low, curve.high):  # the ends are no estimates
            assert band[[0, 2]].tolist() == pytest.approx([0, 1])

    def test_several_seeds_are_drawn_too(self) -> None:
        """Seeds that disagree widen the band: with one prompt each there is nothing else to draw."""
        both = pool([made_up([0.2]), made_up([0.8])])
        assert both.low[1] == pytest.approx(0.2)
        assert both.high[1] == pytest.approx(0.8)
        assert made_up([0.2]).low[1] == made_up([0.2]).high[1]

    def test_is_the_same_every_time(self) -> None:
        curves = [made_up([0.2]), made_up([0.8])]
        assert torch.equal(pool(curves).low, pool(curves).low)


class TestGrid:
    def test_heads_one_by_one_up_to_150(self) -> None:
        assert HEADS.grid(144) == list(range(145))
        assert HEADS.grid(270) == [*range(151), *range(160, 270, 10), 270]

    @given(
        st.sampled_from(["heads", "edges", "attention"]), st.integers(1, 100_000), st.sampled_from([0, 2, 3, 10, 40])
    )
    @settings(deadline=None, max_examples=60)
    def test_goes_from_nothing_to_everything(self, level: str, total: int, points: int) -> None:
        ks = LEVELS[level].grid(total, points)
        assert (ks[0], ks[-1]) == (0, total)
        assert ks == sorted(set(ks))
        assert len(ks) <= (points + 1 if points else 33) or level == "heads"

    def test_edges_are_spaced_by_their_logarithm(self) -> None:
        ks = EDGES.grid(32_491)
        assert 25 < len(ks) <= 33
        ratios = [b / a for a, b in itertools.pairwise(ks[10:])]
        assert max(ratios) / min(ratios) < 1.1


class TestOfAModel:
    def test_effect_is_0_with_nothing_and_1_with_everything(self, family: Model) -> None:
        task = random_task(n=3, lengths=(6, 5))
        for attribute in (attribute_heads, attribute_edges, attribute_attention):
            curve = explained_effect(family, task, attribute(family, task), CurveSettings(points=4, random_points=3))
            assert curve.random is not None
            for one in (curve, curve.random):
                assert one.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-6)
                assert one.kept[0] == 0
            assert curve.kept[-1] == curve.random.kept[-1]
            torch.testing.assert_close(curve.everything, curve.random.everything, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("source", ["mean", "zero"])
    def test_other_sources(self, source: str) -> None:
        model, task = tiny("gemma2"), random_task(n=3, lengths=(6, 5))
        for attribute in (attribute_heads, attribute_edges):
            settings = CurveSettings(points=3, source=source, random_points=0)
            curve = explained_effect(model, task, attribute(model, task), settings)
            assert curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-6)
            assert curve.source == source
            assert curve.random is None

    def test_does_not_depend_on_the_memory(self) -> None:
        model, task = tiny("llama"), random_task(n=4, lengths=(6, 5))
        for attribute in (attribute_heads, attribute_edges, attribute_attention):
            scores = attribute(model, task)
            settings = CurveSettings(points=5)
            large, small = (explained_effect(model, task, scores, settings, context=Context(gb)) for gb in (2.0, 1e-9))
            torch.testing.assert_close(large.metrics, small.metrics, rtol=1e-4, atol=1e-4)

    def test_a_metric_that_nothing_changes(self) -> None:
        model, task = tiny("llama"), random_task()
        for bucket in task.buckets:
            bucket.corrupt.copy_(bucket.clean)
        with pytest.raises(GatelensError, match="there is no effect to explain"):
            explained_effect(model, task, HeadScores(torch.rand(3, 4), "by hand"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ranking": "best"}, "no ranking 'best'"),
        ({"source": "noise"}, "no source 'noise'"),
        ({"points": 1}, "at least 2 points"),
        ({"points": -3}, "points is -3: it must be at least 0"),
        ({"random_points": -1}, "random_points is -1"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict, message: str) -> None:
    with pytest.raises(GatelensError, match=message):
        CurveSettings(**wrong)


def test_edges_effect_of_a_given_set_is_the_curves(stories: Model) -> None:
    task = make_task("induction", stories, n=4)
    scores = attribute_edges(stories, task)
    curve = explained_effect(stories, task, scores, CurveSettings(points=6, random_points=0))
    circuits = Circuits.of(stories, task, scores)
    k = curve.asked[-2]
    inside, rest = edges_effect(stories, task, circuits.gates(0, [k])[0])
    assert inside == pytest.approx(float(curve.effect[-2]), abs=1e-4)
    everything, nothing = edges_effect(stories, task, scores.graph.edges)
    assert (everything, nothing) == (pytest.approx(1, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert rest != pytest.approx(inside)
