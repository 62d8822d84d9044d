"""The level of attention edges: a gate lets the contribution p_ij v_j of one key to one query pass, or replaces it.

The gates are (row, prompt, layer, head, query, key). Every prompt has its own edges: the keys that are visible to a
query and, in a sparse model, open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.gates.attention_runs import (
    AttentionRun,
    attention_numbers,
    capture_attention,
    learned_attention_numbers,
    run_attention,
)
from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Metric, Pass, SourceGroup, layers_of, z_gradients
from gatelens.gates.level import Cost, Level, PatchedGates, Source
from gatelens.gates.runs import gradient_numbers
from gatelens.gates.scores import GateSet, Scores
from gatelens.model import Model
from gatelens.model.components import Head
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.precision import widen
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import join


class AttentionEdge(NamedTuple):
    """One key that one query of a head attends to, in one prompt (in the order of the task's buckets).

    Example:
        prompt, head, query, key = gatelens.attribute_attention(model, task).top(1)[0].gate
    """

    prompt: int  # the number of the prompt
    head: Head  # the head that attends
    query: int  # the position that reads, from 0
    key: int  # the position that is read, from 0


class AttentionEdgeScores(Scores):
    """Scores of attention edges: of all of them (`AttentionScores`), or of the best ones (`BestAttentionScores`)."""

    @property
    def level(self) -> Attention:
        return ATTENTION

    def gate(self, number: int, position: int) -> tuple[AttentionEdge, str]:
        shape = self.gate_sets()[number].scores.shape
        layer, head, query, key = (int(index) for index in torch.unravel_index(torch.tensor(position), shape))
        edge = AttentionEdge(number, Head(layer, head), query, key)
        return edge, f"prompt {number}: {edge.head}, query {query} <- key {key}"

    def ends(self, gate: AttentionEdge) -> tuple[str, ...]:
        return (str(gate.head),)

    def membership(self, k: int, orders: Sequence[Int[Tensor, " _gate"]]) -> Float[Tensor, " head"]:
        """How many of a prompt's first k edges each head has, mean over prompts.

        Edges belong to prompts, which differ between task seeds, so single edges of two runs cannot be compared.
        """
        heads = []
        for order, gate_set in zip(orders, self.gate_sets(), strict=True):
            n_layers, n_heads, n_queries, n_keys = gate_set.scores.shape
            numbers = order[:k] // (n_queries * n_keys)
            heads.append(torch.bincount(numbers, minlength=n_layers * n_heads).float())
        return torch.stack(heads).mean(0)


@dataclass(frozen=True, eq=False, repr=False)
class AttentionScores(AttentionEdgeScores):
    """How much each attention edge of each prompt matters, for each bucket of the task.

    Example:
        scores = gatelens.attribute_attention(model, task)
        scores.scores[0].shape  # of the first prompt: layer, head, query, key
    """

    scores: Sequence[Shaped[Tensor, "_prompt layer head _query _key"]]  # lengths differ between buckets
    edges: Sequence[Bool[Tensor, "_prompt layer head _query _key"]]  # where an edge exists (in a sample: was scored)
    method: str
    sampled: bool = False  # whether only a sample of the edges was scored

    @property
    def is_sample(self) -> bool:
        return self.sampled

    def gate_sets(self) -> list[GateSet]:
        buckets = zip(self.scores, self.edges, strict=True)
        prompts = [prompt for bucket in buckets for prompt in zip(*bucket, strict=True)]
        return [GateSet(scores, edges, scores.abs()) for scores, edges in prompts]  # of one prompt: nothing cancels out

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for i, (scores, edges) in enumerate(zip(self.scores, self.edges, strict=True)):
            tensors |= {f"bucket-{i}.scores": scores, f"bucket-{i}.edges": edges}
        return tensors

    def compact(self) -> Scores:
        from gatelens.gates.best_attention import BestAttentionScores

        return BestAttentionScores.of(self)

    def by_head(self) -> Float[Tensor, "layer head"]:
        """The sum of the scores of a head's edges, mean over prompts."""
        sums = [scores.sum((3, 4)) for scores in self.scores]
        return torch.cat(sums).mean(0)


class AttentionAttribution(Attribution):
    """The products (p_ij v_j - corrupt p_ij v_j) . d metric / d z_i of all attention edges."""

    def __init__(self, model: Model, batch: Bucket, metric: Metric) -> None:
        super().__init__(model, batch, metric)
        self.clean, self.corrupt = (capture_attention(model, tokens) for tokens in (batch.clean, batch.corrupt))
        self.edges = self.clean.edges | self.corrupt.edges

    def products(self, step: Pass) -> Shaped[Tensor, "prompt layer head query key"]:
        gradients = z_gradients(self.model, self.batch.clean, self.metric, step)
        products = torch.zeros(self.edges.shape, dtype=self.model.wide_dtype)
        for layer in layers_of(step, gradients):
            gradient = widen(gradients[layer])
            change = _products(self.clean, layer, gradient) - _products(self.corrupt, layer, gradient)
            products[:, layer] = change.cpu()
        return products

    def groups(self) -> list[SourceGroup]:
        return [SourceGroup("heads", layer) for layer in range(self.model.n_layers)]

    def piece(self, scores: Shaped[Tensor, "prompt ..."]) -> Shaped[Tensor, "prompt 2 ..."]:
        """On axis 1: first the scores, then 1 where an edge exists and 0 where it does not."""
        return torch.stack([scores, self.edges.to(scores)], 1)


class Attention(Level[AttentionScores]):
    """Gates on attention edges."""

    name, noun = "attention", "attention edges"
    sources = ("corrupt", "zero")
    shared = False
    cost = Cost(captures=2, patch=1.0, circuit=1.0, learned=3.0)
    log_axis, head_map = True, "sum of the scores of its attention edges"

    def shape(self, model: Model, length: int) -> tuple[int, ...]:
        return model.n_layers, model.n_heads, length, length

    def n_gates(self, graph: Graph, length: int) -> int:
        return graph.n_layers * graph.n_heads * length * (length + 1) // 2

    def positions(self, model: Model, *runs: AttentionRun) -> list[Int[Tensor, " _gate"]]:
        # An edge that is closed in both runs of a sparse model does not exist.
        return [edges.flatten().nonzero()[:, 0] for edges in torch.stack([run.edges for run in runs]).any(0)]

    def capture(self, model: Model, tokens: Int[Tensor, "prompt position"]) -> AttentionRun:
        return capture_attention(model, tokens)

    def closed(
        self, model: Model, tokens: Int[Tensor, "prompt position"], source: Source, mean: Callable[[], Any]
    ) -> AttentionRun | None:
        return None if source == "zero" else capture_attention(model, tokens)

    def reads(self, run: AttentionRun) -> AttentionRun:
        return run

    def run(
        self,
        model: Model,
        tokens: Int[Tensor, "prompt position"],
        gates: Shaped[Tensor, "row prompt layer head query key"],
        closed: AttentionRun | None,
        *,
        start: AttentionRun | None = None,
        context: Context,
    ) -> Float[Tensor, "row prompt vocab"]:
        return run_attention(model, tokens, gates, closed, context=context)

    def attribution(self, model: Model, batch: Bucket, metric: Metric) -> AttentionAttribution:
        return AttentionAttribution(model, batch, metric)

    def attributed(self, model: Model, task: CircuitTask, pieces: Iterable[Tensor], method: str) -> AttentionScores:
        pieces = list(pieces)
        # Joined one by one: a view of a piece with both would keep twice the memory.
        scores = join(task, [piece[:, 0] for piece in pieces])
        edges = join(task, [piece[:, 1].bool() for piece in pieces])
        return AttentionScores(scores, edges, method)

    def patched(self, model: Model, task: CircuitTask, gates: PatchedGates) -> AttentionScores:
        shapes = [self.shape(model, bucket.clean.shape[1]) for bucket in task.buckets]
        scores, edges = (
            [flat.unflatten(1, shape) for flat, shape in zip(join(task, [part]), shapes, strict=True)]
            for part in (gates.scores, gates.measured)
        )
        return AttentionScores(scores, edges, gates.method, gates.is_sample)

    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> AttentionEdgeScores:
        from gatelens.gates.best_attention import BestAttentionScores

        if BestAttentionScores.are_in(tensors):
            return BestAttentionScores.read(tensors, method)
        n_buckets = sum(name.endswith(".scores") for name in tensors)
        scores, edges = ([tensors[f"bucket-{i}.{kind}"] for i in range(n_buckets)] for kind in ("scores", "edges"))
        return AttentionScores(scores, edges, method)

    def row_numbers(self, model: Model, length: int) -> int:
        return attention_numbers(model, length)

    def learned_numbers(self, model: Model, length: int) -> int:
        return learned_attention_numbers(model, length)

    def closed_numbers(self, model: Model, length: int) -> int:
        return 3 * attention_numbers(model, length)

    def attribute_numbers(self, model: Model, length: int) -> int:
        return gradient_numbers(model, length) + attention_numbers(model, length)

    def held_numbers(self, model: Model, length: int) -> int:
        # Scores, whether an edge exists, absolute scores, and the order of the edges and a random one (64 bits each, of
        # the half of the pairs that is visible).
        return 5 * model.n_layers * model.n_heads * length**2

    def rows_at_once(self, model: Model) -> int:
        return 8


def _products(
    run: AttentionRun, layer: int, gradient: Shaped[Tensor, "prompt query head dim"]
) -> Shaped[Tensor, "prompt head query key"]:
    """Compute p_ij v_j . (gradient at z_i) for every edge of a layer."""
    return widen(run.weights[layer]) * torch.einsum("bihd,bhjd->bhij", gradient, widen(run.values[layer]))


ATTENTION = Attention()
