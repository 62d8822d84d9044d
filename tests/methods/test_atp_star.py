"""AtP*, against a plain model in float64 on which every correction is written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import CONFIGS, prompts, tiny_float64
from torch import Tensor
from toys import off, parts_of, plain_run, planted, planted_task, random_task

from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.gates.attention_runs import capture_attention
from gatelens.gates.edges import EdgeScores
from gatelens.gates.query_key import QueryKeyEdges
from gatelens.methods.atp_star import attribute_with_corrections
from gatelens.methods.attribution import attribute
from gatelens.methods.patching import patch
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.sparse.in_model import make_sparse
from gatelens.tasks.base import Bucket, CircuitTask


def plain_gradients(model: Model, task: CircuitTask, bucket: Bucket, dropped: int | None) -> tuple[Any, Any]:
    """Gradients at the inputs of destinations and at the outputs of sources, without those through one layer."""
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def leaf(leaves: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
        return leaves.setdefault(name, torch.zeros_like(like).requires_grad_())

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        parts = []
        for source, output in sources.items():
            part = output + leaf(outputs, source, output)
            is_dropped = dropped is not None and (source == f"M{dropped}" or source.startswith(f"L{dropped}H"))
            parts.append(part.detach() if is_dropped else part)
        return sum(parts) + biases + leaf(inputs, name, sources["embed"])

    logits = plain_run(model, bucket.clean, read)[1]
    leaves = [*inputs.values(), *outputs.values()]
    gradients = torch.autograd.grad(
        task.metric(logits, bucket).sum(), leaves, allow_unused=True, materialize_grads=True
    )
    return dict(zip(inputs, gradients, strict=False)), dict(zip(outputs, gradients[len(inputs) :], strict=True))


@torch.no_grad()
def weights(model: Model, n: int, h: int, x_q: Tensor, x_k: Tensor) -> Tensor:
    """The attention weights of one head that reads these streams."""
    parts = parts_of(model)
    layer, kv = parts.layers[n], h // (model.n_heads // model.n_kv_heads)
    q = parts.rotate(parts.project(layer, "q", h, parts.norm(layer, x_q)))
    k = parts.rotate(parts.project(layer, "k", kv, parts.norm(layer, x_k)))
    hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
    return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)


def plain_products(model: Model, task: CircuitTask, bucket: Bucket, dropped: int | None) -> Tensor:
    """The product of every edge of one prompt, with recomputed softmax for queries and keys: (source, destination)."""
    graph, parts = Graph.of(model.anatomy), parts_of(model)
    streams: dict[str, Tensor] = {}

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        streams[name] = sum(sources.values()) + biases
        return streams[name]

    with torch.no_grad():
        clean, corrupt = plain_run(model, bucket.clean, read)[0], plain_run(model, bucket.corrupt)[0]
        plain_run(model, bucket.clean, read)  # the streams of the clean run
    at_inputs, at_outputs = plain_gradients(model, task, bucket, dropped)
    products = torch.zeros(graph.edges.shape, dtype=torch.float64)
    group = model.n_heads // model.n_kv_heads
    for source, destination in graph.edges.nonzero().tolist():
        end, name = graph.destination_names[destination], graph.source_names[source]
        change = clean[name] - corrupt[name]
        if not end.endswith((".q", ".k")):
            products[source, destination] = (change * at_inputs[end]).sum()
            continue
        n, number = (int(part) for part in end[1:-2].replace("KV", "H").split("H"))
        heads = [number] if end.endswith(".q") or group == 1 else range(number * group, (number + 1) * group)
        for h in heads:
            x = streams[end]
            without = weights(model, n, h, *((x - change, x) if end.endswith(".q") else (x, x - change)))
            lost = weights(model, n, h, x, x) - without
            v = parts.project(parts.layers[n], "v", h // group, parts.norm(parts.layers[n], x))
            products[source, destination] += (parts.out(parts.layers[n], h, lost @ v) * at_outputs[f"L{n}H{h}"]).sum()
    return products


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_edges(name: str) -> None:
    model, task = tiny_float64(name, num_hidden_layers=2), random_task(n=2, lengths=(4, 3))
    expected = torch.zeros(Graph.of(model.anatomy).edges.shape, dtype=torch.float64)
    for bucket in task.buckets:
        plain, *drops = (plain_products(model, task, bucket, dropped) for dropped in (None, 0, 1))
        expected += plain.sign() * sum(drop.abs() for drop in drops) / len(task)
    assert off(attribute_with_corrections(EDGES, model, task).scores, expected) < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_heads(name: str) -> None:
    model, task = tiny_float64(name), random_task(n=2, lengths=(4, 3))
    expected = torch.zeros(model.n_layers, model.n_heads, dtype=torch.float64)
    heads = [f"L{n}H{h}" for n in range(model.n_layers) for h in range(model.n_heads)]
    for bucket in task.buckets:
        with torch.no_grad():
            clean, corrupt = (plain_run(model, tokens)[0] for tokens in (bucket.clean, bucket.corrupt))
        gradients = [plain_gradients(model, task, bucket, dropped)[1] for dropped in (None, 0, 1, 2)]
        plain, *drops = (torch.stack([((clean[h] - corrupt[h]) * at[h]).sum() for h in heads]) for at in gradients)
        expected += (plain.sign() * sum(drop.abs() for drop in drops) / 2 / len(task)).view_as(expected)
    assert off(attribute_with_corrections(HEADS, model, task).scores, expected) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_a_head_with_one_attention_edge_is_that_edge(name: str) -> None:
    model, task = tiny_float64(name), random_task(n=2, lengths=(1,))
    heads = attribute_with_corrections(HEADS, model, task).scores
    assert off(attribute_with_corrections(ATTENTION, model, task).by_head(), heads) < 1e-5
    assert torch.isfinite(attribute_with_corrections(EDGES, model, task).scores).all()


@pytest.mark.parametrize("side", ["query", "key"])
def test_edges_into_queries_and_keys_move_the_gates_of_a_sparse_model(side: str) -> None:
    """Where the scores are 0, only the offsets of one side depend on the prompt. So without the embedding's difference,
    a head has the open weights of the corrupt prompt.
    """
    model, generator = tiny_float64("llama", num_hidden_layers=1), torch.Generator().manual_seed(0)
    shape = (1, model.n_heads, model.anatomy.width)
    model.hf.model.layers[0].self_attn.get_submodule("k_proj" if side == "query" else "q_proj").weight.zero_()
    make_sparse(model.hf, 1.2, gate="probability", **{side: 0.3 * torch.randn(shape, generator=generator)})
    clean, corrupt = prompts(rows=2, length=6), prompts(rows=2, length=6, seed=1)
    with_clean, with_corrupt = (capture_attention(model, tokens) for tokens in (clean, corrupt))
    lost, values = with_clean.weights[0] - with_corrupt.weights[0], with_clean.values[0]
    assert 0 < lost.ne(0).float().mean() < 1
    gradient = torch.randn(2, 6, model.n_heads * model.anatomy.head_dim, generator=generator, dtype=torch.float64)
    by_head = gradient.unflatten(-1, (model.n_heads, -1))
    expected = torch.einsum("phij,phjd,pihd->ph", lost, values.double(), by_head)
    graph = Graph.of(model.anatomy)
    differences = torch.zeros(graph.n_sources, *clean.shape, model.anatomy.width, dtype=torch.float64)
    differences[0] = model.hf.model.embed_tokens(clean) - model.hf.model.embed_tokens(corrupt)
    queries, keys = QueryKeyEdges(model, clean, differences).products([{0: gradient}])
    found = (queries if side == "query" else keys).products
    if side == "key":
        expected = expected.unflatten(-1, (model.n_kv_heads, -1)).sum(-1)
    torch.testing.assert_close(found[0, :, 0], expected)


def test_saturated_attention_is_seen() -> None:
    """The planted head attends to one token with nearly all weight: its queries and keys have almost no gradient."""
    model, task = planted(), planted_task()

    def share(scores: EdgeScores, edge: str) -> float:
        return float(scores.scores[scores.graph.edge(edge)].abs() / scores.scores.abs().max())

    exact, corrected, plain = (method(EDGES, model, task) for method in (patch, attribute_with_corrections, attribute))
    assert share(exact, "L0H2 -> L1H1.k") > 0.2
    assert share(corrected, "L0H2 -> L1H1.k") > 0.2
    assert share(plain, "L0H2 -> L1H1.k") < 0.05
