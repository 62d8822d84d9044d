"""EAP-IG on activations, against paths that are written out on a plain model in float64."""

from __future__ import annotations

import pytest
import torch
from families import tiny_float64
from torch import Tensor
from toys import PLAIN, off, plain_run, random_task

from gatelens.gates import ATTENTION, EDGES, HEADS
from gatelens.methods.activation_path import attribute_activations
from gatelens.methods.attribution import attribute
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask

POINTS = [1 / 6, 1 / 2, 5 / 6]


def group_of(name: str) -> str:
    """The sources that move together: the heads of one layer, or one MLP, or the embedding."""
    return name.split("H")[0]


def plain_scores(model: Model, task: CircuitTask) -> Tensor:
    """Every source's path by explicit interpolation: (source, destination)."""
    graph = Graph.of(model.anatomy)
    total = torch.zeros(graph.edges.shape, dtype=torch.float64)
    for bucket in task.buckets:
        clean, corrupt = (plain_run(model, tokens)[0] for tokens in (bucket.clean, bucket.corrupt))
        for group in dict.fromkeys(map(group_of, clean)):
            members = [name for name in clean if group_of(name) == group]
            for point in POINTS:
                moved = {name: corrupt[name] + point * (clean[name] - corrupt[name]) for name in members}
                gradients = gradients_at(model, task, bucket, moved)
                for member in members:
                    change = clean[member] - corrupt[member]
                    for name, gradient in gradients.items():
                        edge = graph.source_names.index(member), graph.destination_names.index(name)
                        total[edge] += (change * gradient).sum() / len(POINTS)
    return total * graph.edges / len(task)


def gradients_at(model: Model, task: CircuitTask, bucket: Bucket, moved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The gradient at every destination's input, while some sources have these outputs and the rest follows."""
    leaves: dict[str, Tensor] = {}

    def read(name: str, sources: dict[str, Tensor], biases: Tensor) -> Tensor:
        leaves.setdefault(name, torch.zeros_like(sources["embed"]).requires_grad_())  # heads may share a k or v input
        return sum((sources | {m: moved[m] for m in moved if m in sources}).values()) + biases + leaves[name]

    logits = plain_run(model, bucket.clean, read)[1]
    value = task.metric(logits, bucket).sum()
    gradients = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {name: g for name, g in zip(leaves, gradients, strict=True) if g is not None}


@pytest.mark.parametrize("name", PLAIN)
def test_edges_have_the_path_of_their_source(name: str) -> None:
    model, task = tiny_float64(name, num_hidden_layers=2), random_task(n=3, lengths=(6, 4))
    scores = attribute_activations(EDGES, model, task, steps=3)
    expected = plain_scores(model, task)
    assert scores.method == "eap-ig-activations (3 steps)"
    assert off(scores.scores, expected) < 2e-6
    assert off(attribute(EDGES, model, task, steps=3).scores, expected) > 1e-2  # the path of embeddings is another one


def test_the_edges_of_a_group_add_up_to_its_effect() -> None:
    """With many steps the integral of the gradient is what the metric loses when the group is set to corrupt."""
    model, task = tiny_float64("gpt2", num_hidden_layers=2), random_task(n=2, lengths=(5,))
    [bucket], graph = task.buckets, Graph.of(model.anatomy)
    scores = attribute_activations(EDGES, model, task, steps=200).scores
    corrupt = plain_run(model, bucket.corrupt)[0]
    clean_metric = task.metric(plain_run(model, bucket.clean)[1], bucket).mean()
    for group in ("embed", "L0", "M0", "L1", "M1"):
        members = [name for name in corrupt if group_of(name) == group]

        def read(_: str, sources: dict[str, Tensor], biases: Tensor, members: list[str] = members) -> Tensor:
            return sum((sources | {name: corrupt[name] for name in members if name in sources}).values()) + biases

        lost = clean_metric - task.metric(plain_run(model, bucket.clean, read)[1], bucket).mean()
        numbers = [graph.source_names.index(name) for name in members]
        assert float(scores[numbers].sum()) == pytest.approx(float(lost), abs=2e-3 * abs(float(lost)) + 1e-4)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_heads_and_their_attention_edges_agree(name: str) -> None:
    """A head's attention edges add up to the head; without a norm after it, a head's edges do so as well."""
    model, task = tiny_float64(name), random_task(n=2, lengths=(5,))
    heads = attribute_activations(HEADS, model, task, steps=2).scores
    attention = attribute_activations(ATTENTION, model, task, steps=2)
    assert off(attention.by_head(), heads) < 1e-5
    if name != "gemma2":
        edges, graph = attribute_activations(EDGES, model, task, steps=2).scores, Graph.of(model.anatomy)
        by_head = torch.stack([edges[graph.heads(layer)].sum(1) for layer in range(graph.n_layers)])
        assert off(by_head, heads) < 1e-5


@pytest.mark.parametrize("level", [HEADS, EDGES], ids=["heads", "edges"])
def test_points_one_at_a_time_give_the_same(level: object) -> None:
    model, task = tiny_float64("llama"), random_task(n=2, lengths=(5, 4))
    together = attribute_activations(level, model, task, steps=3).scores
    assert off(attribute_activations(level, model, task, steps=3, context=Context(1e-9)).scores, together) < 1e-6
