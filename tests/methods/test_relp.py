"""RelP, against exact patching of a linear model that is written out: what RelP holds is a constant there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from families import CONFIGS, tiny_float64
from torch import Tensor
from toys import linear, off, parts_of, random_task, read_all

from gatelens.gates import ATTENTION, EDGES, HEADS, LEVELS
from gatelens.methods.attribution import attribute
from gatelens.methods.relp import relevance_patching
from gatelens.model import Model
from gatelens.model.graph import Graph


@dataclass
class Constants:
    """What the clean run leaves: one constant for each nonlinear operation, in the order of their calls."""

    values: list[Tensor] = field(default_factory=list)
    at: int | None = None  # None while they are recorded

    def __call__(self, compute: Callable[[], Tensor]) -> Tensor:
        if self.at is None:
            self.values.append(compute())
            return self.values[-1]
        self.at += 1
        return self.values[self.at - 1]


def linear_run(model: Model, tokens: Tensor, constants: Constants, read: Any = read_all) -> tuple[Any, Tensor]:
    """The clean run, with constants in place of scales, attention weights, and factors of MLPs."""
    parts = parts_of(model)
    sources = {"embed": parts.embed(tokens)}
    biases = torch.zeros(model.anatomy.width, dtype=torch.float64)
    group = model.n_heads // model.n_kv_heads

    def normed(module: Any, x: Tensor) -> Tensor:
        weight, bias = module.weight, getattr(module, "bias", None)
        if bias is None:  # RMSNorm
            return x * constants(lambda: (x.pow(2).mean(-1, keepdim=True) + module.variance_epsilon).rsqrt()) * weight
        centred = x - x.mean(-1, keepdim=True)
        scale = constants(lambda: (centred.pow(2).mean(-1, keepdim=True) + module.eps).rsqrt())
        return centred * scale * weight + bias

    def mlp(layer: Any, x: Tensor) -> Tensor:
        if hasattr(layer.mlp, "c_fc"):
            hidden = layer.mlp.c_fc(normed(layer.ln_2, x))
            return layer.mlp.c_proj(hidden * constants(lambda: layer.mlp.act(hidden) / hidden))
        x = normed(layer.post_attention_layernorm, x)
        gate, up = layer.mlp.gate_proj(x), layer.mlp.up_proj(x)
        gate = gate * constants(lambda: layer.mlp.act_fn(gate) / gate)
        gate_constant, up_constant = constants(lambda: gate), constants(lambda: up)
        return layer.mlp.down_proj(0.5 * (gate * up_constant + gate_constant * up))

    for n in range(model.n_layers):
        layer, before = parts.layers[n], dict(sources)
        norm = layer.ln_1 if hasattr(layer, "ln_1") else layer.input_layernorm
        for h in range(model.n_heads):
            kv = f"L{n}H{h}" if group == 1 else f"L{n}KV{h // group}"
            inputs = (read(name, before, biases) for name in (f"L{n}H{h}.q", f"{kv}.k", f"{kv}.v"))
            q, k, v = (
                parts.project(layer, kind, head, normed(norm, x))
                for kind, head, x in zip("qkv", (h, h // group, h // group), inputs, strict=True)
            )
            q, k = parts.rotate(q), parts.rotate(k)
            hidden = torch.ones(q.shape[1], q.shape[1]).triu(1).bool()
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
            sources[f"L{n}H{h}"] = parts.out(layer, h, constants(lambda scores=scores: scores.softmax(-1)) @ v)
        biases = biases + parts.out_bias(layer)
        sources[f"M{n}"] = mlp(layer, read(f"M{n}", dict(sources), biases))
    final = model.anatomy.final_norm.part
    return sources, model.hf.lm_head(normed(final, read("logits", sources, biases)))[:, -1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@torch.no_grad()
def test_relp_is_exact_on_the_linear_model(name: str) -> None:
    model, task = tiny_float64(name, num_hidden_layers=2), random_task(n=2, lengths=(5,))
    [bucket], graph = task.buckets, Graph.of(model.anatomy)
    constants = Constants()
    clean, logits = linear_run(model, bucket.clean, constants)
    torch.testing.assert_close(logits, model.hf(bucket.clean).logits[:, -1], rtol=1e-5, atol=1e-5)
    corrupt = linear_run(model, bucket.corrupt, Constants())[0]
    expected = torch.zeros(graph.edges.shape, dtype=torch.float64)
    for source, destination in graph.edges.nonzero().tolist():
        end, name_of_source = graph.destination_names[destination], graph.source_names[source]

        def read(name: str, sources: Any, biases: Tensor, end: str = end, start: str = name_of_source) -> Tensor:
            stream = sum(sources.values()) + biases
            return stream - (clean[start] - corrupt[start]) if name == end else stream

        constants.at = 0
        patched = linear_run(model, bucket.clean, constants, read)[1]
        expected[source, destination] = (task.metric(logits, bucket) - task.metric(patched, bucket)).mean()
    assert off(relevance_patching(EDGES, model, task).scores, expected) < 1e-5
    assert (expected[:, graph.attention_inputs(1)][:, : model.n_heads] == 0).all()  # queries get nothing
    assert off(attribute(EDGES, model, task).scores, expected) > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_the_levels_agree(name: str) -> None:
    """The attention edges of a head add up to the head, and so do its edges if no norm follows them."""
    model, task = tiny_float64(name), random_task(n=2, lengths=(6,))
    heads = relevance_patching(HEADS, model, task).scores
    assert off(relevance_patching(ATTENTION, model, task).by_head(), heads) < 1e-5
    graph = Graph.of(model.anatomy)
    if not graph.coupled:
        edges = relevance_patching(EDGES, model, task).scores
        by_head = torch.stack([edges[graph.heads(layer)].sum(1) for layer in range(graph.n_layers)])
        assert off(by_head, heads) < 1e-5


@pytest.mark.parametrize("level", LEVELS.values(), ids=list(LEVELS))
def test_on_a_linear_model_it_is_attribution(level: Any) -> None:
    model, task = linear("gpt2"), random_task(n=2, lengths=(5,))
    expected, actual = (method(level, model, task).gate_sets() for method in (attribute, relevance_patching))
    for ours, theirs in zip(actual, expected, strict=True):
        assert off(ours.scores, theirs.scores) < 1e-4


def test_the_model_is_left_as_it_was() -> None:
    model, task = tiny_float64("llama"), random_task(n=1)
    before = attribute(EDGES, model, task).scores
    relevance_patching(EDGES, model, task)
    assert torch.equal(attribute(EDGES, model, task).scores, before)
