"""All three levels on a model with probability gates: gates that see log p, with offsets and rest values."""

from __future__ import annotations

import pytest
import torch
from families import LENGTH, prompts, sparse_model, tiny
from torch import Tensor
from toys import PLAIN, plain_run, random_task

import gatelens
from gatelens import Model
from gatelens.gates import EDGES
from gatelens.gates.attention_runs import attention_patterns, capture_attention, run_attention
from gatelens.gates.component_runs import capture_components
from gatelens.gates.edge_runs import run_edges
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture
from gatelens.model.graph import Graph
from gatelens.sparse.in_model import dense_attention
from gatelens.sparse.recording import record_open

CLOSE = {"rtol": 1e-4, "atol": 5e-5}
BOTH = prompts(), prompts(seed=1)  # clean and corrupt


@torch.no_grad()
def plain(model: Model, tokens: Tensor) -> Tensor:
    return model.hf(input_ids=tokens, use_cache=False).logits[:, -1]


@pytest.mark.parametrize("name", PLAIN)
class TestEdges:
    def test_the_oracle_is_the_model(self, name: str) -> None:
        model, gates = sparse_model(name)
        with torch.no_grad():
            torch.testing.assert_close(plain_run(model, BOTH[0], gates=gates)[1], plain(model, BOTH[0]), **CLOSE)

    def test_random_gates(self, name: str) -> None:
        """The offsets of a head's queries belong to its q input, those of its keys to its k input."""
        model, values = sparse_model(name)
        graph = Graph.of(model.anatomy)
        edges = torch.rand(3, graph.n_sources, graph.n_destinations, generator=torch.Generator().manual_seed(1))
        edges[1:] = (edges[1:] > 0.5).float()
        with torch.no_grad():
            corrupt = plain_run(model, BOTH[1], gates=values)[0]
        actual = run_edges(model, BOTH[0], edges, capture_components(model, BOTH[1]))

        for row, logits in zip(edges, actual, strict=True):

            def read(name: str, sources: dict[str, Tensor], biases: Tensor, row: Tensor = row) -> Tensor:
                column = row[:, graph.destination_names.index(name)].tolist()
                parts = [g * x + (1 - g) * corrupt[s] for g, (s, x) in zip(column, sources.items(), strict=False)]
                return sum(parts) + biases

            with torch.no_grad():
                right = plain_run(model, BOTH[0], read, gates=values)[1]
            torch.testing.assert_close(logits, right, **CLOSE)

    def test_attribution_through_gates(self, name: str) -> None:
        """Every edge's score, against autograd on the plain model with an input of its own for each destination."""
        model, values = sparse_model(name)
        graph, task = Graph.of(model.anatomy), random_task(n=3)
        [bucket] = task.buckets
        inputs: dict[str, Tensor] = {}

        def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
            stream = sum(sources.values()) + biases
            inputs.setdefault(name, torch.zeros_like(stream).requires_grad_())  # heads of a KV head share theirs
            return stream + inputs[name]

        corrupt = plain_run(model, bucket.corrupt, gates=values)[0]
        clean, logits = plain_run(model, bucket.clean, read, gates=values)
        task.metric(logits, bucket).sum().backward()
        right = torch.zeros(graph.n_sources, graph.n_destinations)
        for i, source in enumerate(graph.source_names):
            difference = (clean[source] - corrupt[source]).detach()
            for j, destination in enumerate(graph.destination_names):
                right[i, j] = (difference * inputs[destination].grad).sum()  # type: ignore[operator]
        right *= graph.edges
        actual = gatelens.attribute(EDGES, model, task, straight_through=True).scores * len(task)
        torch.testing.assert_close(actual, right, rtol=1e-3, atol=1e-4)
        without = gatelens.attribute(EDGES, model, task).scores * len(task)
        assert not torch.allclose(without, right, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
class TestAttention:
    def test_all_open_is_the_model(self, family: str) -> None:
        model, _ = sparse_model(family)
        gates = torch.ones(1, 1, model.n_layers, model.n_heads, LENGTH, LENGTH)
        for source in (None, capture_attention(model, BOTH[1])):
            torch.testing.assert_close(run_attention(model, BOTH[0], gates, source)[0], plain(model, BOTH[0]), **CLOSE)
        closed = run_attention(model, BOTH[1], 0 * gates, capture_attention(model, BOTH[1]))[0]
        torch.testing.assert_close(closed, plain(model, BOTH[1]), **CLOSE)

    def test_without_edges_a_head_gives_its_rest_value(self, family: str) -> None:
        model, values = sparse_model(family)
        gates = torch.zeros(1, 1, model.n_layers, model.n_heads, LENGTH, LENGTH)
        assert values.rest is not None
        right = run_heads(model, BOTH[0], torch.zeros(1, model.n_layers, model.n_heads), list(values.rest))[0]
        torch.testing.assert_close(run_attention(model, BOTH[0], gates)[0], right, **CLOSE)

    def test_edges_are_those_of_the_operator(self, family: str) -> None:
        model, values = sparse_model(family)
        run, (patterns, edges) = capture_attention(model, BOTH[0]), attention_patterns(model, BOTH[0])
        with torch.no_grad(), record_open(model.hf, edges=True) as record:
            model.hf(BOTH[0], use_cache=False)
        right = record.edges.transpose(0, 1)
        assert torch.equal(run.edges, right)
        assert torch.equal(edges, right)
        torch.testing.assert_close(patterns.sum(-1), torch.ones(patterns.shape[:-1]))
        assert values.rest is not None
        for p, v, z, rest in zip(run.weights, run.values, capture(model, BOTH[0]).heads, values.rest, strict=True):
            torch.testing.assert_close((p @ v).transpose(1, 2) + rest, z, **CLOSE)

    def test_scores_and_curves(self, family: str) -> None:
        model, _ = sparse_model(family)
        task = random_task(n=3, lengths=(5, 4))
        for scores in (gatelens.attribute_attention(model, task, 2), gatelens.patch_attention(model, task)):
            curve = gatelens.explained_effect(model, task, scores)
            assert curve.effect[[0, -1]].tolist() == pytest.approx([0, 1], abs=1e-4)


def test_without_gates_a_model_is_plain() -> None:
    """Offsets are then neither computed nor expected."""
    model, _ = sparse_model("llama")
    graph = Graph.of(model.anatomy)
    edges = torch.rand(1, graph.n_sources, graph.n_destinations, generator=torch.Generator().manual_seed(1))
    dense = tiny("llama")
    with dense_attention(model.hf):
        actual = run_edges(model, BOTH[0], edges, capture_components(model, BOTH[1]))
    torch.testing.assert_close(actual, run_edges(dense, BOTH[0], edges, capture_components(dense, BOTH[1])), **CLOSE)
