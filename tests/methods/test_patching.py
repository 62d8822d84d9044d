"""Exact patching, against gates set by hand."""

from __future__ import annotations

import pytest
import torch
from families import tiny
from toys import random_task

from gatelens import GatelensError, Model
from gatelens.gates import EDGES
from gatelens.gates.attention_runs import capture_attention, run_attention
from gatelens.gates.component_runs import capture_components
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.measures.top_k import Circuits
from gatelens.methods.patching import patch_attention, patch_edges, patch_heads
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

CLOSE = {"rtol": 1e-4, "atol": 2e-5}
NAMES = ["gpt2", "gpt_neox", "llama", "gemma2"]


def task() -> CircuitTask:
    return random_task(n=4, lengths=(5, 4))


class TestHeads:
    @pytest.mark.parametrize("direction", ["noising", "denoising"])
    def test_is_the_metric_with_the_gate_set_by_hand(self, family: Model, direction: str) -> None:
        found = patch_heads(family, task(), direction)
        assert found.method == f"patching ({direction})"
        assert found.measured is None
        for layer, head in ((0, 0), (1, 3), (2, 1)):
            total = torch.zeros(())
            for bucket in task().buckets:
                clean, corrupt = capture(family, bucket.clean), capture(family, bucket.corrupt)
                gates = torch.ones(1, family.n_layers, family.n_heads)
                if direction == "denoising":
                    clean, corrupt = corrupt, clean
                gates[0, layer, head] = 0
                patched = task().metric(run_heads(family, clean.tokens, gates, corrupt.heads)[0], bucket)
                lost = (task().metric(clean.logits, bucket) - patched).sum()
                total += lost if direction == "noising" else -lost
            torch.testing.assert_close(found.scores[layer, head], total / 4, **CLOSE)

    def test_a_sample(self) -> None:
        model = tiny("llama")
        whole, some = patch_heads(model, task()), patch_heads(model, task(), sample=5, seed=3)
        assert some.measured is not None
        assert some.measured.sum() == 5
        torch.testing.assert_close(some.scores[some.measured], whole.scores[some.measured], **CLOSE)
        assert not some.scores[~some.measured].any()
        assert not torch.equal(some.measured, patch_heads(model, task(), sample=5, seed=4).measured)

    def test_another_direction(self) -> None:
        with pytest.raises(GatelensError, match="no direction 'sideways'"):
            patch_heads(tiny("llama"), task(), "sideways")


class TestEdges:
    @pytest.mark.parametrize("name", NAMES)
    def test_is_the_metric_with_the_gate_set_by_hand(self, name: str) -> None:
        model = tiny(name, num_hidden_layers=2)
        graph = Graph.of(model.anatomy)
        found = patch_edges(model, task())
        assert found.measured is None
        assert not found.scores[~graph.edges].any()
        for source, destination in graph.edges.nonzero().tolist()[::13]:
            total = torch.zeros(())
            for bucket in task().buckets:
                gates = torch.ones(1, *graph.edges.shape)
                gates[0, source, destination] = 0
                clean, corrupt = capture_components(model, bucket.clean), capture_components(model, bucket.corrupt)
                logits = run_edges(model, bucket.clean, gates, corrupt)[0]
                total += (task().metric(clean.logits, bucket) - task().metric(logits, bucket)).sum()
            torch.testing.assert_close(found.scores[source, destination], total / 4, **CLOSE)

    @pytest.mark.parametrize("name", NAMES)
    def test_a_circuit_of_all_but_one_edge_is_that_edge_patched(self, name: str) -> None:
        model = tiny(name, num_hidden_layers=2)
        graph = Graph.of(model.anatomy)
        edges = graph.edges.flatten().nonzero()[:, 0]
        patched = patch_edges(model, task(), sample=12)
        for place in patched.measured.flatten().nonzero()[:, 0]:
            order = torch.cat([edges[edges != place], place[None]])
            ours = Circuits(EDGES, model, task(), [order])
            kept, everything = torch.zeros(2)
            for i in range(len(ours.batches)):
                both = ours.metric(i, [len(edges) - 1, len(edges)]).sum(1)
                kept, everything = kept + both[0], everything + both[1]
            torch.testing.assert_close(patched.scores.flatten()[place], (everything - kept) / 4, **CLOSE)

    def test_a_sample(self) -> None:
        model = tiny("llama", num_hidden_layers=2)
        whole, some = patch_edges(model, task()), patch_edges(model, task(), sample=30)
        assert some.measured is not None
        assert some.measured.sum() == 30
        assert not some.measured[~some.graph.edges].any()
        torch.testing.assert_close(some.scores[some.measured], whole.scores[some.measured], **CLOSE)


class TestAttention:
    @pytest.mark.parametrize("name", NAMES)
    def test_is_the_metric_with_the_gate_set_by_hand(self, name: str) -> None:
        model = tiny(name, num_hidden_layers=2)
        found = patch_attention(model, task())
        for bucket, scores, edges in zip(task().buckets, found.scores, found.edges, strict=True):
            clean, corrupt = capture_attention(model, bucket.clean), capture_attention(model, bucket.corrupt)
            assert torch.equal(edges, clean.edges)  # a dense model: all visible pairs
            assert not scores[~edges].any()
            for place in edges.nonzero()[::41]:
                gates = torch.ones(1, *edges.shape)
                gates[(0, *place)] = 0
                logits = run_attention(model, bucket.clean, gates, corrupt)[0]
                lost = task().metric(clean.logits, bucket) - task().metric(logits, bucket)
                torch.testing.assert_close(scores[tuple(place)], lost[place[0]], **CLOSE)

    def test_a_sample_of_each_prompt_does_not_depend_on_the_split(self) -> None:
        model = tiny("llama", num_hidden_layers=2)
        whole, some = patch_attention(model, task()), patch_attention(model, task(), 7)
        split = patch_attention(model, task(), 7, context=Context(1e-9))
        for i in range(2):
            assert (some.edges[i].flatten(1).sum(1) == 7).all()
            assert torch.equal(some.edges[i], split.edges[i])
            torch.testing.assert_close(some.scores[i][some.edges[i]], whole.scores[i][some.edges[i]], **CLOSE)
