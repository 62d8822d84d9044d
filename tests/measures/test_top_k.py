"""Which gates the top k are, and what the metric of such a circuit is."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import GatelensError
from gatelens.gates.attention import AttentionScores
from gatelens.gates.attention_runs import capture_attention, run_attention
from gatelens.gates.component_runs import capture_components, with_sources
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.edges import EdgeScores
from gatelens.gates.head_runs import run_heads
from gatelens.gates.heads import HeadScores
from gatelens.gates.runs import capture
from gatelens.gates.scores import rank
from gatelens.measures.top_k import Circuits
from gatelens.methods.patching import patch_attention, patch_edges, patch_heads
from gatelens.model.components import Head
from gatelens.model.graph import Graph

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MODEL = tiny("llama")
TASK = random_task(n=4, lengths=(6, 5))
GRAPH = Graph.of(MODEL.anatomy)
HEADS = HeadScores(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), "by hand")
EDGES = EdgeScores(
    torch.randn(GRAPH.edges.shape, generator=torch.Generator().manual_seed(1)) * GRAPH.edges, GRAPH, "by hand"
)


class TestRank:
    def test_by_absolute_value_and_by_sign(self) -> None:
        scores = torch.tensor([0.5, -2.0, 1.0, 0.0])
        heads = HeadScores(scores[None], "")
        assert heads.orders("absolute")[0].tolist() == [1, 2, 0, 3]
        assert heads.orders("signed")[0].tolist() == [2, 0, 3, 1]

    def test_ties_stand_in_their_order(self) -> None:
        assert rank(torch.tensor([1.0, 2.0, 1.0, 1.0])).tolist() == [1, 0, 2, 3]

    def test_the_best_by_name(self) -> None:
        scores = torch.zeros(3, 4)
        scores[1, 2], scores[0, 3] = -3.0, 2.0
        assert HeadScores(scores, "").top(2) == [(Head(1, 2), "L1H2", -3.0), (Head(0, 3), "L0H3", 2.0)]
        assert [gate for gate, *_ in HeadScores(scores, "").top(1, "signed")] == [Head(0, 3)]
        edges = torch.zeros(GRAPH.edges.shape)
        edges[GRAPH.edge("L0H1 -> L1KV1.k")] = -1.5
        assert EdgeScores(edges, GRAPH, "").top(1) == [(GRAPH.edge("L0H1 -> L1KV1.k"), "L0H1 -> L1KV1.k", -1.5)]


def in_order(metric_of_bucket: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(metric_of_bucket)


@pytest.mark.parametrize("source", ["corrupt", "mean", "zero"])
@pytest.mark.parametrize("complement", [False, True])
class TestMetric:
    def test_heads(self, source: str, complement: bool) -> None:
        ours = Circuits.of(MODEL, TASK, HEADS, "absolute", source)
        gates = torch.zeros(1, 3, 4)
        for head, _, _ in HEADS.top(5):
            gates[0, head.layer, head.index] = 1
        gates = 1 - gates if complement else gates
        runs = [capture(MODEL, bucket.corrupt).heads for bucket in TASK.buckets]
        mean = [torch.cat([run[n].flatten(0, 1) for run in runs]).mean(0) for n in range(3)]
        for i, bucket in enumerate(TASK.buckets):
            value = {"corrupt": runs[i], "mean": mean, "zero": None}[source]
            wanted = TASK.metric(run_heads(MODEL, bucket.clean, gates, value), bucket)
            torch.testing.assert_close(ours.metric(i, [5], complement), wanted, **CLOSE)
        assert ours.counts([0, 5, 12]) == [0, 5, 12]

    def test_edges(self, source: str, complement: bool) -> None:
        ours = Circuits.of(MODEL, TASK, EDGES, "absolute", source)
        kept = torch.zeros(1, *GRAPH.edges.shape, dtype=torch.bool)
        for edge, name, _ in EDGES.top(80):
            assert GRAPH.edge(name) == edge
            kept[(0, *edge)] = True
        kept = GRAPH.on_a_path(GRAPH.edges & ~kept if complement else kept)
        runs = [capture_components(MODEL, bucket.corrupt) for bucket in TASK.buckets]
        mean = torch.cat([run.sources.flatten(1, 2) for run in runs], 1).mean(1)[:, None, None]
        for i, bucket in enumerate(TASK.buckets):
            other = {"mean": mean, "zero": torch.zeros_like(mean)}.get(source)
            reference = runs[i] if other is None else with_sources(MODEL, runs[i], other)
            wanted = TASK.metric(run_edges(MODEL, bucket.clean, kept, reference), bucket)
            torch.testing.assert_close(ours.metric(i, [80], complement), wanted, **CLOSE)
        if not complement:
            assert ours.counts([0, 80]) == [0, int(kept.sum())]
            assert 0 < kept.sum() < 80

    def test_attention(self, source: str, complement: bool) -> None:
        edges = [capture_attention(MODEL, bucket.clean).edges for bucket in TASK.buckets]
        generator = torch.Generator().manual_seed(2)
        values = [torch.randn(there.shape, generator=generator) * there for there in edges]
        scores = AttentionScores(values, edges, "by hand")
        if source == "mean":
            with pytest.raises(GatelensError, match="no source 'mean' for attention edges"):
                Circuits.of(MODEL, TASK, scores, "absolute", source)
            return
        ours = Circuits.of(MODEL, TASK, scores, "absolute", source)
        for i, bucket in enumerate(TASK.buckets):
            least = values[i].abs().flatten(1).sort(descending=True).values[:, 9]  # each prompt's tenth
            gates = (values[i].abs() >= least[:, None, None, None, None]) & edges[i]
            assert gates.sum() == 10 * len(bucket)
            gates = edges[i] & ~gates if complement else gates
            other = None if source == "zero" else capture_attention(MODEL, bucket.corrupt)
            wanted = TASK.metric(run_attention(MODEL, bucket.clean, gates[None], other), bucket)
            torch.testing.assert_close(ours.metric(i, [10], complement), wanted, **CLOSE)
        assert ours.counts([0, 10, 10**6]) == [0, 10, sum(int(e.sum()) for e in edges) / 4]


class TestRandom:
    @pytest.mark.parametrize("scores", [HEADS, EDGES], ids=["heads", "edges"])
    def test_has_the_same_gates_in_another_order(self, scores: HeadScores | EdgeScores) -> None:
        ours = Circuits.of(MODEL, TASK, scores)
        other = ours.shuffled(0)
        assert sorted(other.orders[0].tolist()) == sorted(ours.orders[0].tolist())
        assert other.orders[0].tolist() != ours.orders[0].tolist()
        assert other.orders[0].tolist() == ours.shuffled(0).orders[0].tolist()
        assert other.orders[0].tolist() != ours.shuffled(1).orders[0].tolist()

    def test_does_not_know_the_scores(self) -> None:
        flipped = HeadScores(HEADS.scores.flip(0), "by hand")
        assert torch.equal(
            Circuits.of(MODEL, TASK, HEADS).shuffled(3).orders[0],
            Circuits.of(MODEL, TASK, flipped).shuffled(3).orders[0],
        )


def test_a_sample_is_no_ranking_of_all_gates() -> None:
    for scores in (patch_heads(MODEL, TASK, sample=2), patch_edges(MODEL, TASK, 2), patch_attention(MODEL, TASK, 2)):
        with pytest.raises(GatelensError, match="only a sample of the gates has scores"):
            Circuits.of(MODEL, TASK, scores)


@pytest.mark.parametrize("scores", [HEADS, EDGES], ids=["heads", "edges"])
def test_the_first_prompts_read_the_mean_of_all_prompts(scores: HeadScores | EdgeScores) -> None:
    """Also if nothing needed the mean before, as in a run that resumes."""
    few = Circuits.of(MODEL, TASK, scores, source="mean").first_prompts(2)
    whole = Circuits.of(MODEL, TASK, scores, source="mean")
    metrics = torch.empty(2, len(TASK))
    for circuits, row in ((whole, metrics[0]), (few, metrics[1])):
        for i, bucket in enumerate(circuits.batches):
            row[bucket.which] = circuits.metric(i, [5])[0]
    torch.testing.assert_close(metrics[1, :2], metrics[0, :2], **CLOSE)
