"""Curves that are measured: grids, refinement around the count, several seeds, and their ends for every family."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from families import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import random_task

from gatelens import CurveSettings, GatelensError, Model, explained_effect
from gatelens.gates import EDGES, HEADS, LEVELS
from gatelens.gates.heads import HeadScores
from gatelens.measures.curves import Curve, pool
from gatelens.measures.effect import baseline_grid, edges_effect
from gatelens.measures.refinement import REFINED_POINTS, most_refined_points, refinement
from gatelens.measures.top_k import Circuits
from gatelens.methods.attribution import attribute_attention, attribute_edges, attribute_heads
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Journal
from gatelens.tasks import task as make_task


class TestGrid:
    @pytest.mark.parametrize("total", [12, 144, 270, 1024])
    def test_neighbours_differ_by_one_head_or_5_percent(self, total: int) -> None:
        ks = HEADS.grid(total)
        assert all(b - a == 1 or b - a <= 0.05 * b for a, b in itertools.pairwise(ks))
        assert ks[:38] == list(range(min(38, total + 1)))
        assert len(ks) < 120

    @given(
        st.sampled_from(["heads", "edges", "attention"]), st.integers(1, 100_000), st.sampled_from([0, 2, 3, 10, 40])
    )
    @settings(deadline=None, max_examples=60)
    def test_goes_from_nothing_to_everything(self, level: str, total: int, points: int) -> None:
        ks = LEVELS[level].grid(total, points)
        assert (ks[0], ks[-1]) == (0, total)
        assert ks == sorted(set(ks))
        if level == "heads" and not points:  # every step is as large as the rule allows: one head, or 5 %
            assert all(b - a == 1 or 20 * (b - a) <= b for a, b in itertools.pairwise(ks))
            assert all(20 * (b + 1 - a) >= b + 1 for a, b in itertools.pairwise(ks) if b < total)
        else:
            assert len(ks) <= (points + 1 if points else 33)

    def test_edges_are_spaced_by_their_logarithm(self) -> None:
        ks = EDGES.grid(32_491)
        assert 25 < len(ks) <= 33
        ratios = [b / a for a, b in itertools.pairwise(ks[10:])]
        assert max(ratios) / min(ratios) < 1.1

    @pytest.mark.parametrize(("level", "points"), [("edges", 8), ("attention", 3), ("heads", 5), ("edges", 1)])
    def test_of_a_random_order_has_points_where_its_curve_rises(self, level: str, points: int) -> None:
        ks = baseline_grid(LEVELS[level], 10_000, points)
        assert (ks[0], ks[-1]) == (0, 10_000)
        assert len(ks) <= max(3, points + 1)
        if points == 8:
            assert sum(k >= 3000 for k in ks) >= 4


def stepped(ks: list[int], n_prompts: int = 16) -> Curve:
    """The curve of a ranking on this grid, if prompt i reaches its whole effect with 3,000 + 200 i of 50,000 gates."""
    needed = 3000 + 200 * torch.arange(n_prompts)
    metrics = (torch.tensor(ks)[:, None] >= needed).float()[None]
    return Curve("edges", 50_000, ks, torch.tensor(ks).float(), metrics, metrics[:, 0], metrics[:, -1])


class TestRefinement:
    def test_ends_when_the_count_is_known_to_5_percent(self) -> None:
        curve, added = stepped(EDGES.grid(50_000)), 0
        coarse = curve.count_at(0.9)
        while more := refinement(curve, 0.9, 0.05, REFINED_POINTS - added):
            added += len(more)
            curve = curve.with_points(stepped(more))
        truth = 3000 + 200 * 14  # 15 of 16 prompts are 94 %, 14 are 88 %
        assert truth <= curve.count_at(0.9) <= 1.05 * truth < coarse
        point = curve.point_at(0.9)
        assert curve.kept[point] - curve.kept[point - 1] <= 0.05 * curve.kept[point]
        # The ends of the interval are as precise, and the rest of the grid is as coarse as it was.
        for end in curve.count_interval(0.9):
            at = curve.kept.tolist().index(end)
            assert curve.kept[at] - curve.kept[at - 1] <= 0.06 * curve.kept[at]
        assert added <= REFINED_POINTS
        assert [k for k in curve.asked if k < 1500] == [k for k in EDGES.grid(50_000) if k < 1500]

    @pytest.mark.parametrize("points", [4, 8, 16])
    def test_from_any_grid_the_count_comes_first(self, points: int) -> None:
        """With so few circuits that only the count can be refined, it is found by cutting into thirds."""
        grid = EDGES.grid(50_000, points)
        curve, left = stepped(grid), most_refined_points(grid, 0.05)
        assert left <= REFINED_POINTS
        while left and (more := refinement(curve, 0.9, 0.05, left)):
            left -= len(more)
            curve = curve.with_points(stepped(more))
        point = curve.point_at(0.9)
        assert 5800 <= curve.count_at(0.9) <= 1.05 * 5800
        assert curve.kept[point] - curve.kept[point - 1] <= 0.05 * curve.kept[point]

    def test_adds_no_circuit_if_it_is_off_or_the_grid_has_no_step(self) -> None:
        assert most_refined_points([0, 100, 1000], 0) == most_refined_points([5], 0.05) == 0

    def test_a_threshold_that_is_not_reached_refines_nothing(self) -> None:
        assert refinement(stepped([0, 100, 200]), 0.9, 0.05) == []

    def test_the_step_before_the_count_is_cut_into_thirds(self) -> None:
        """From 8 to 64 gates, evenly spaced by the logarithm: 16 and 32."""
        metrics = torch.tensor([0.0, 0.2, 1.0])[None, :, None]
        kept, ends = torch.tensor([0.0, 8, 64]), (metrics[:, 0], metrics[:, -1])
        assert refinement(Curve("edges", 64, [0, 8, 64], kept, metrics, *ends), 0.9, 0.05, most=2) == [16, 32]

    def test_with_few_circuits_left_the_span_of_the_interval_gets_none(self) -> None:
        """Three circuits are less than the count still needs, so all of them are for the step before it."""
        curve = stepped(EDGES.grid(50_000))
        point = curve.point_at(0.9)
        assert point is not None
        more = refinement(curve, 0.9, 0.05, most=3)
        assert len(more) == 2
        assert all(curve.asked[point - 1] < k < curve.asked[point] for k in more)

    @pytest.mark.parametrize("total", [1, 2, 7])
    def test_few_gates(self, total: int) -> None:
        metrics = torch.tensor([0.0, 1.0])[None, :, None]
        ends = metrics[:, 0], metrics[:, -1]
        curve = Curve("heads", total, [0, total], torch.tensor([0.0, total]), metrics, *ends)
        more = refinement(curve, 0.9, 0.05)
        assert more == sorted(set(more))
        assert all(0 < k < total for k in more)
        assert bool(more) == (total > 1)

    def test_edges_on_no_path_do_not_stop_it(self) -> None:
        """Between 1,000 and 1,001 asked edges, a path closes and 300 more count: one edge is as fine as it gets."""
        metrics = torch.tensor([0.0, 0.2, 1.0, 1.0])[None, :, None]
        kept, ends = torch.tensor([0.0, 100, 400, 9000]), (metrics[:, 0], metrics[:, -1])
        curve = Curve("edges", 9000, [0, 1000, 1001, 9000], kept, metrics, *ends)
        assert refinement(curve, 0.9, 0.05) == []


class TestSeveralSeeds:
    def test_give_the_curve_that_pooled_curves_give(self) -> None:
        model, tasks = tiny("llama"), [random_task(n=3, lengths=(6, 5), seed=seed) for seed in (0, 1)]
        scores = [attribute_edges(model, task) for task in tasks]
        coarse = CurveSettings(points=5, random_points=3, refine=0)
        one_by_one = pool([explained_effect(model, *both, coarse) for both in zip(tasks, scores, strict=True)])
        together = explained_effect(model, tasks, scores, coarse)
        for a, b in ((one_by_one, together), (one_by_one.random, together.random)):
            assert a is not None
            assert b is not None
            assert a.asked == b.asked
            torch.testing.assert_close(a.kept, b.kept)
            torch.testing.assert_close(a.metrics, b.metrics)
            assert a.fingerprints == b.fingerprints == tuple(task.fingerprint() for task in tasks)

    def test_keep_their_pieces_apart(self, tmp_path: Path) -> None:
        model, tasks = tiny("llama"), [random_task(n=3, lengths=(6,), seed=seed) for seed in (0, 1)]
        scores = [attribute_edges(model, task) for task in tasks]
        coarse = CurveSettings(points=3, random_points=0, refine=0, areas="none")
        saved = Context(journal=Journal(tmp_path))
        right = explained_effect(model, tasks, scores, coarse).metrics
        for _ in range(2):  # computed, and read again
            torch.testing.assert_close(explained_effect(model, tasks, scores, coarse, context=saved).metrics, right)

    def test_share_the_refined_grid(self) -> None:
        model, tasks = tiny("llama"), [random_task(n=3, lengths=(6, 5), seed=seed) for seed in (0, 1)]
        scores = [attribute_edges(model, task) for task in tasks]
        curve = explained_effect(model, tasks, scores, CurveSettings(points=4, random_points=0, threshold=0.5))
        assert curve.metrics.shape == (2, len(curve.asked), 3)
        assert len(curve.asked) > 5
        assert refinement(curve, 0.5, 0.05) == []
        first = curve.of_seed(0)
        alone = explained_effect(model, tasks[0], scores[0], CurveSettings(points=4, random_points=0, refine=0))
        shared = [first.asked.index(k) for k in alone.asked]
        torch.testing.assert_close(first.metrics[:, shared], alone.metrics)
        assert first.fingerprints == alone.fingerprints


def test_a_curve_is_refined_around_other_thresholds_too() -> None:
    model, task = tiny("llama"), random_task(n=3, lengths=(6, 5))
    scores = attribute_edges(model, task)
    both = CurveSettings(points=4, random_points=0, areas="none", threshold=0.5, also_at=(0.95, 0.5))
    assert both.refined_at == (0.5, 0.95)
    curve = explained_effect(model, task, scores, both)
    assert [refinement(curve, threshold, 0.05) for threshold in both.refined_at] == [[], []]
    one = both.replace(also_at=())
    alone = explained_effect(model, task, scores, one)
    assert refinement(alone, 0.95, 0.05)
    assert set(alone.asked) < set(curve.asked)
    assert "also_at" not in one.identity()


def test_refined_circuits_are_saved_and_read_again(tmp_path: Path) -> None:
    """A second run reads every circuit from the journal: its model gives another answer to anything it computes."""
    model, task = tiny("llama"), random_task(n=3, lengths=(6, 5))
    scores = attribute_edges(model, task)
    settings = CurveSettings(points=4, random_points=3, threshold=0.5)
    first = explained_effect(model, task, scores, settings, context=Context(journal=Journal(tmp_path)))
    with torch.no_grad():
        for weight in model.hf.parameters():
            weight.mul_(0.5)
    again = explained_effect(model, task, scores, settings, context=Context(journal=Journal(tmp_path)))
    assert again.asked == first.asked
    assert len(first.asked) > 5
    assert torch.equal(again.metrics, first.metrics)


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

    @pytest.mark.slow
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
        ({"threshold": 1.5}, "threshold is 1.5: it must be at most 1"),
        ({"refine": -0.1}, "refine is -0.1: it must be at least 0"),
        ({"also_at": (0.8, 1.2)}, "also_at is 1.2: a threshold is above 0 and at most 1"),
    ],
)
def test_settings_that_make_no_sense(wrong: dict, message: str) -> None:
    with pytest.raises(GatelensError, match=message):
        CurveSettings(**wrong)


def test_edges_effect_of_a_given_set_is_the_curves(trained: Model) -> None:
    task = make_task("induction", trained, n=4)
    scores = attribute_edges(trained, task)
    curve = explained_effect(trained, task, scores, CurveSettings(points=6, random_points=0))
    circuits = Circuits.of(trained, task, scores)
    k = curve.asked[-2]
    inside, rest = edges_effect(trained, task, circuits.gates(0, [k])[0])
    assert inside == pytest.approx(float(curve.effect[-2]), abs=1e-4)
    everything, nothing = edges_effect(trained, task, scores.graph.edges)
    assert (everything, nothing) == (pytest.approx(1, abs=1e-5), pytest.approx(0, abs=1e-5))
    assert rest != pytest.approx(inside)
