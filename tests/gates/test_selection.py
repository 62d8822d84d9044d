"""Rankings and selections: what is kept when scores of prompts cancel out, and circuits that grow from the logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import CircuitSettings, CurveSettings, GatelensError, explained_effect, patch_heads
from gatelens.errors import GatelensWarning
from gatelens.gates import LEVELS
from gatelens.gates.edges import EdgeScores
from gatelens.gates.heads import HeadScores
from gatelens.gates.scores import Scores
from gatelens.gates.selection import Selection, grown, register, selected, selections
from gatelens.methods.attribution import attribute
from gatelens.methods.patching import patch
from gatelens.model.components import Head
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import select

GRAPHS = [Graph(2, 4, 2), Graph(3, 2, 2, parallel=True), Graph(2, 4, 2, coupled=True), Graph(2, 2, 1)]
MODEL, TASK = tiny("llama"), random_task(n=5, lengths=(6, 5))


def one_by_one(task: CircuitTask) -> list[CircuitTask]:
    return [select(task, [i]) for i in range(len(task))]


class TestPerPrompt:
    """The ranking by a prompt's absolute score, mean over prompts."""

    @pytest.mark.parametrize("steps", [1, 3])
    @pytest.mark.parametrize("level", ["heads", "edges"])
    def test_attribution_is_that_of_single_prompts(self, level: str, steps: int) -> None:
        scores = attribute(LEVELS[level], MODEL, TASK, steps)
        single = [attribute(LEVELS[level], MODEL, one, steps).scores for one in one_by_one(TASK)]
        torch.testing.assert_close(scores.scores, torch.stack(single).mean(0), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(scores.magnitudes, torch.stack(single).abs().mean(0), rtol=1e-4, atol=1e-5)
        assert (scores.magnitudes > 1.01 * scores.scores.abs()).any()  # some gates help one prompt and hurt another
        small = attribute(LEVELS[level], MODEL, TASK, steps, context=Context(1e-9))
        torch.testing.assert_close(small.magnitudes, scores.magnitudes, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("level", ["heads", "edges"])
    def test_patching_is_that_of_single_prompts(self, level: str) -> None:
        sample = 12 if level == "edges" else None
        scores = patch(LEVELS[level], MODEL, TASK, sample=sample)
        single = [patch(LEVELS[level], MODEL, one, sample=sample).scores for one in one_by_one(TASK)]
        torch.testing.assert_close(scores.magnitudes, torch.stack(single).abs().mean(0), rtol=1e-4, atol=1e-5)

    def test_attention_edges_belong_to_one_prompt(self) -> None:
        scores = attribute(LEVELS["attention"], MODEL, TASK)
        for ours, plain in zip(scores.orders("per-prompt"), scores.orders("absolute"), strict=True):
            assert torch.equal(ours, plain)

    def test_a_gate_that_cancels_out_is_kept(self) -> None:
        """L0H1 has the scores +3 and -3 on two prompts, L0H0 has 1 on both."""
        scores = HeadScores(torch.tensor([[1.0, 0.0]]), "", magnitudes=torch.tensor([[1.0, 3.0]]))
        assert [head for head, *_ in scores.top(2, "per-prompt")] == [Head(0, 1), Head(0, 0)]
        assert [head for head, *_ in scores.top(1, "absolute")] == [Head(0, 0)]
        assert scores.top(1, "per-prompt")[0].score == 0.0  # the score is still the mean

    def test_is_saved_and_read(self, tmp_path: Path) -> None:
        for level in ("heads", "edges"):
            scores = attribute(LEVELS[level], MODEL, TASK)
            again = LEVELS[level].read_scores(scores.tensors(), Graph.of(MODEL.anatomy), "eap")
            assert torch.equal(again.magnitudes, scores.magnitudes)
            assert torch.equal(again.orders("per-prompt")[0], scores.orders("per-prompt")[0])

    def test_scores_that_are_means_only_say_so(self) -> None:
        with pytest.raises(GatelensError, match="means over prompts only"):
            HeadScores(torch.ones(2, 2), "").orders("per-prompt")


class TestGrowth:
    @pytest.mark.parametrize("graph", GRAPHS)
    def test_an_input_of_a_component_is_one_whose_change_reaches_its_output(self, graph: Graph) -> None:
        for source in range(1, graph.n_sources):
            circuits = torch.zeros(graph.n_destinations, *graph.edges.shape, dtype=torch.bool)
            circuits[:, source, graph.logits] = True
            for destination in range(graph.n_destinations - 1):
                circuits[destination, 0, destination] = True
            connected = graph.on_a_path(circuits)[:, source, graph.logits].nonzero()[:, 0].tolist()
            assert graph.inputs_of(source) == connected
        assert graph.inputs_of(0) == []

    @pytest.mark.parametrize("graph", GRAPHS)
    def test_takes_the_best_edge_and_a_path_to_it(self, graph: Graph) -> None:
        """Against a plain search over all edges."""
        priorities = torch.rand(graph.edges.shape, generator=torch.Generator().manual_seed(1))
        inputs = {source: graph.inputs_of(source) for source in range(graph.n_sources)}
        left = [(i, j) for i, j in graph.edges.nonzero().tolist()]
        circuit: list[tuple[int, int]] = []

        def take(edge: tuple[int, int]) -> None:
            if edge in left:
                left.remove(edge)
                circuit.append(edge)

        fed = {0}
        while left:
            reached = {graph.logits}.union(*(inputs[source] for source, _ in circuit))
            source, destination = max((e for e in left if e[1] in reached), key=lambda e: priorities[e])
            take((source, destination))
            while source not in fed:
                fed.add(source)
                every = [(i, j) for j in inputs[source] for i in range(graph.n_sources) if graph.edges[i, j]]
                best = max(every, key=lambda e: priorities[e])
                take(best)
                source = best[0]
        assert [divmod(k, graph.n_destinations) for k in grown(graph, priorities).tolist()] == circuit

    def test_the_first_edges_are_edges_of_a_circuit(self) -> None:
        graph = Graph(6, 4, 2)
        priorities = torch.rand(graph.edges.shape, generator=torch.Generator().manual_seed(2)) ** 4
        scores = EdgeScores(priorities * graph.edges, graph, "")
        shares = {}
        for selection in ("top", "path"):
            [order] = selected(scores, "absolute", selection)
            assert sorted(order.tolist()) == graph.edges.flatten().nonzero()[:, 0].tolist()
            mask = torch.zeros(graph.edges.numel(), dtype=torch.bool)
            mask[order[:30]] = True
            shares[selection] = int(graph.on_a_path(mask.view(1, *graph.edges.shape)).sum())
        assert shares["path"] >= 28 > 2 * shares["top"]

    def test_circuits_and_curves_grow_too(self) -> None:
        task = random_task(n=3, lengths=(6,))
        scores = attribute(LEVELS["edges"], MODEL, task)
        settings = CurveSettings(points=5, random_points=0, selection="path", ranking="per-prompt", refine=0)
        curve = explained_effect(MODEL, task, scores, settings)
        assert (curve.selection, curve.ranking) == ("path", "per-prompt")
        assert curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-6)
        plain = explained_effect(MODEL, task, scores, settings.replace(selection="top"))
        assert curve.kept.sum() > plain.kept.sum()  # fewer edges on no path

    def test_only_edges_have_paths(self) -> None:
        with pytest.raises(GatelensError, match="'path' does not select heads: it selects edges"):
            CircuitSettings(level="heads", selection="path")
        with pytest.raises(GatelensError, match="no selection 'best': There are top, path"):
            CurveSettings(selection="best")


class TestConsistent:
    """Gates whose score keeps its sign when prompts are resampled."""

    @pytest.mark.parametrize("level", ["heads", "edges"])
    def test_errors_are_those_of_single_prompts(self, level: str) -> None:
        sample = 12 if level == "edges" else None
        methods: list[Callable[[CircuitTask], Any]] = [
            lambda task: attribute(LEVELS[level], MODEL, task, 2),
            lambda task: patch(LEVELS[level], MODEL, task, sample=sample),
        ]
        for by in methods:
            scores, single = by(TASK), torch.stack([by(one).scores for one in one_by_one(TASK)])
            expected = single.std(0, correction=0) / len(TASK) ** 0.5
            torch.testing.assert_close(scores.errors, expected, rtol=1e-2, atol=1e-4)
            assert by(select(TASK, [0])).errors is None  # one prompt cannot be resampled

    def test_is_the_share_of_drawn_resamplings(self) -> None:
        task = random_task(n=16, lengths=(5,), seed=3)
        single = torch.stack([attribute(LEVELS["edges"], MODEL, one).scores for one in one_by_one(task)])
        single = single[:, Graph.of(MODEL.anatomy).edges]
        drawn = torch.randint(16, (4000, 16), generator=torch.Generator().manual_seed(0))
        weights = torch.zeros(4000, 16).scatter_add_(1, drawn, torch.ones(4000, 16))
        same = ((weights @ single).sign() == single.mean(0).sign()).float().mean(0)
        scores = attribute(LEVELS["edges"], MODEL, task)
        [gate_set] = scores.gate_sets()
        ours = gate_set.same_sign()[gate_set.exists]
        assert (ours - same).abs().mean() < 0.02
        assert (ours - same).abs().max() < 0.15
        assert ours.min() < 0.6 < 0.95 < ours.max()  # both kinds of edges are there

    def test_takes_consistent_gates_first(self) -> None:
        """The chances of the same sign are 0.98, 0.69 and 1."""
        scores = HeadScores(torch.tensor([[2.0, 3.0, -1.0, 0.0]]), "", errors=torch.tensor([[1.0, 6.0, 0.0, 0.0]]))
        assert selected(scores, "absolute", "consistent")[0].tolist() == [0, 2, 1, 3]
        assert selected(scores, "absolute", "consistent=0.5")[0].tolist() == [1, 0, 2, 3]
        assert selected(scores, "signed", "consistent=0.99")[0].tolist() == [2, 1, 0, 3]

    def test_is_saved_and_measured(self) -> None:
        scores = attribute(LEVELS["heads"], MODEL, TASK)
        again = LEVELS["heads"].read_scores(scores.tensors(), Graph.of(MODEL.anatomy), "eap")
        assert torch.equal(again.errors, scores.errors)
        settings = CurveSettings(points=4, random_points=0, selection="consistent=0.8", refine=0, areas="none")
        assert explained_effect(MODEL, TASK, again, settings).selection == "consistent=0.8"

    def test_scores_without_errors_say_so(self) -> None:
        with pytest.raises(GatelensError, match="no standard errors over prompts"):
            selected(HeadScores(torch.ones(2, 2), ""), "absolute", "consistent")
        with pytest.raises(GatelensError, match="a level whose gates all prompts share"):
            selected(attribute(LEVELS["attention"], MODEL, TASK), "absolute", "consistent")


class TestPositiveRatio:
    @pytest.mark.parametrize("share", [0.3, 0.5, 0.75, 1.0])
    def test_is_the_best_positives_filled_up_by_the_ranking(self, share: float) -> None:
        """For every k: the best share * k positive gates, then the best others, as the plain definition says."""
        values = torch.randn(40, generator=torch.Generator().manual_seed(5)) - 0.4
        [order] = selected(HeadScores(values.view(4, 10), ""), "absolute", f"positive-ratio={share}")
        by_size = values.abs().argsort(descending=True).tolist()
        positives = [gate for gate in by_size if values[gate] > 0]
        for k in range(41):
            first = positives[: math.ceil(share * k - 1e-9)]
            filled = [gate for gate in by_size if gate not in first][: k - len(first)]
            assert set(order[:k].tolist()) == {*first, *filled}

    def test_numbers_are_checked(self) -> None:
        assert CurveSettings(selection="positive-ratio=0.6").selection == "positive-ratio=0.6"
        with pytest.raises(GatelensError, match="'positive-ratio=2': its number must be above 0 and at most 1"):
            CurveSettings(selection="positive-ratio=2")
        with pytest.raises(GatelensError, match=r"no selection 'top=0\.5': it has no number\. Write 'top'"):
            CurveSettings(selection="top=0.5")
        with pytest.raises(GatelensError, match="no selection 'positive': did you mean 'positive-ratio'"):
            CurveSettings(selection="positive")


def test_a_selection_is_a_registered_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gatelens.gates.selection._SELECTIONS", dict(selections()))

    def worst_first(scores: Scores, ranking: str) -> list[torch.Tensor]:
        return [order.flip(0) for order in scores.orders(ranking)]

    register(Selection("worst", worst_first, "the worst gates first"))
    scores = attribute(LEVELS["heads"], MODEL, TASK)
    curve = explained_effect(MODEL, TASK, scores, CurveSettings(points=3, random_points=0, selection="worst"))
    assert curve.selection == "worst"
    assert torch.equal(selected(scores, "absolute", "worst")[0].flip(0), scores.orders("absolute")[0])
    with pytest.raises(ValueError, match="registered twice"):
        register(Selection("worst", worst_first, ""))


def test_denoising_is_a_poor_ranking() -> None:
    scores = patch_heads(MODEL, TASK, "denoising")
    with pytest.warns(GatelensWarning, match="Rank them by noising"):
        explained_effect(MODEL, TASK, scores, CurveSettings(points=3, random_points=0))
