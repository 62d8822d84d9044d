"""A ranking's top k, kept: the metric of such circuits at each granularity.

Everything outside a circuit is at its corrupt value, or at its mean over the task's corrupt prompts, or zero. A
circuit of no gates and one of all gates are runs like any other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attention import AttentionRun, attention_numbers, capture_attention, run_attention
from gatelens.gates.edges import Components, capture_components, edge_numbers, run_edges, with_sources
from gatelens.gates.heads import HeadSource, run_heads
from gatelens.gates.runs import capture, moment_numbers
from gatelens.gates.scores import AttentionScores, EdgeScores, HeadScores, Ranking, Scores, rank
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import batches

Source = Literal["corrupt", "mean", "zero"]
SOURCES = ("corrupt", "mean", "zero")


class Circuits(ABC):
    """The circuits that keep the top k of one ranking, for one task."""

    level: str
    total: int  # gates in all (attention edges: of the longest prompt)

    def __init__(self, model: Model, task: CircuitTask, source: Source, memory_gb: float) -> None:
        if source not in SOURCES:
            raise GatelensError(f"no source '{source}': what is left out is put to {', '.join(SOURCES)}.")
        self.model, self.task, self.source, self.memory_gb = model, task, source, memory_gb
        self.batches = batches(task, self.numbers_per_prompt, memory_gb)

    @abstractmethod
    def numbers_per_prompt(self, length: int) -> int:
        """How many numbers one circuit holds for a prompt of this length."""

    @abstractmethod
    def counts(self, ks: Sequence[int]) -> list[float]:
        """How many gates each circuit really keeps."""

    @abstractmethod
    def metric(self, batch: int, ks: Sequence[int], complement: bool = False) -> Tensor:
        """The metric of each circuit on one batch: (k, prompt). The complement keeps all but the top k."""

    @abstractmethod
    def shuffled(self, seed: int) -> Circuits:
        """The same with a random ranking: the baseline."""


def circuits(
    model: Model,
    task: CircuitTask,
    scores: Scores,
    ranking: Ranking = "absolute",
    source: Source = "corrupt",
    memory_gb: float = 2.0,
) -> Circuits:
    """The circuits of these scores, at their granularity."""
    if scores.sampled if isinstance(scores, AttentionScores) else scores.measured is not None:
        raise GatelensError("only a sample of the gates has scores: a circuit needs scores for all of them.")
    if isinstance(scores, HeadScores):
        return HeadCircuits(model, task, rank(scores.scores.flatten(), ranking), source, memory_gb)
    if isinstance(scores, EdgeScores):
        edges = scores.graph.edges.flatten().nonzero()[:, 0]
        order = edges[rank(scores.scores.flatten()[edges], ranking)]
        return EdgeCircuits(model, task, order, source, memory_gb)
    orders: dict[int, Tensor] = {}
    for bucket, values, there in zip(task.buckets, scores.scores, scores.edges, strict=True):
        for prompt, value, mine in zip(bucket.which.tolist(), values.flatten(1), there.flatten(1), strict=True):
            edges = mine.nonzero()[:, 0]
            orders[prompt] = edges[rank(value[edges], ranking)]
    return AttentionCircuits(model, task, orders, source, memory_gb)


class HeadCircuits(Circuits):
    """Top heads; embedding and MLPs always run on the clean prompt."""

    level = "heads"

    def __init__(self, model: Model, task: CircuitTask, order: Tensor, source: Source, memory_gb: float) -> None:
        super().__init__(model, task, source, memory_gb)
        self.order, self.total = order, model.n_layers * model.n_heads
        self._sources = lru_cache(maxsize=1)(self._make_source)

    def numbers_per_prompt(self, length: int) -> int:
        return 4 * length * moment_numbers(self.model)

    def counts(self, ks: Sequence[int]) -> list[float]:
        return [float(min(k, self.total)) for k in ks]

    def metric(self, batch: int, ks: Sequence[int], complement: bool = False) -> Tensor:
        bucket = self.batches[batch]
        gates = _top(self.order, ks, self.total, complement).unflatten(1, (self.model.n_layers, -1)).float()
        source = self._sources(batch if self.source == "corrupt" else -1)
        logits = run_heads(self.model, bucket.clean, gates, source, memory_gb=self.memory_gb)
        return self.task.metric(logits, bucket)

    def shuffled(self, seed: int) -> HeadCircuits:
        return HeadCircuits(self.model, self.task, _shuffle(self.order, seed), self.source, self.memory_gb)

    def _make_source(self, batch: int) -> HeadSource:
        if self.source == "zero":
            return None
        if self.source == "corrupt":
            return capture(self.model, self.batches[batch].corrupt, streams=False).heads
        runs = [capture(self.model, bucket.corrupt, streams=False).heads for bucket in self.batches]
        layers = [torch.cat([run[n].flatten(0, 1) for run in runs]) for n in range(self.model.n_layers)]
        return [z.mean(0) for z in layers]


class EdgeCircuits(Circuits):
    """Top edges between components, less those on no path from the embedding to the logits."""

    level = "edges"

    def __init__(self, model: Model, task: CircuitTask, order: Tensor, source: Source, memory_gb: float) -> None:
        super().__init__(model, task, source, memory_gb)
        self.graph = Graph.of(model.anatomy)
        self.order, self.total = order, self.graph.n_edges
        self._references = lru_cache(maxsize=1)(self._make_reference)
        self._means = lru_cache(maxsize=1)(self._make_means)

    def numbers_per_prompt(self, length: int) -> int:
        graph = Graph.of(self.model.anatomy)
        return edge_numbers(self.model, length) + length * self.model.anatomy.width * graph.n_sources

    def counts(self, ks: Sequence[int]) -> list[float]:
        return [float(self.kept([k]).sum()) for k in ks]

    def kept(self, ks: Sequence[int], complement: bool = False) -> Tensor:
        """The edges of each circuit: bool (k, source, destination)."""
        shape = (self.graph.n_sources, self.graph.n_destinations)
        kept = _top(self.order, ks, shape[0] * shape[1], complement).unflatten(1, shape)
        return self.graph.on_a_path(kept)

    def metric(self, batch: int, ks: Sequence[int], complement: bool = False) -> Tensor:
        bucket = self.batches[batch]
        gates = self.kept(ks, complement)
        logits = run_edges(self.model, bucket.clean, gates, self._references(batch), memory_gb=self.memory_gb)
        return self.task.metric(logits, bucket)

    def shuffled(self, seed: int) -> EdgeCircuits:
        return EdgeCircuits(self.model, self.task, _shuffle(self.order, seed), self.source, self.memory_gb)

    def _make_reference(self, batch: int) -> Components:
        run = capture_components(self.model, self.batches[batch].corrupt)
        if self.source == "corrupt":
            return run
        sources = torch.zeros_like(run.sources[:, :1, :1]) if self.source == "zero" else self._means()
        return with_sources(run, sources, self.graph)

    def _make_means(self) -> Tensor:
        sums = [capture_components(self.model, bucket.corrupt).sources.sum((1, 2)) for bucket in self.batches]
        count = sum(bucket.corrupt.numel() for bucket in self.batches)
        return torch.stack(sums).sum(0)[:, None, None] / count


class AttentionCircuits(Circuits):
    """Top attention edges of every prompt; k is the number kept in each prompt."""

    level = "attention"

    def __init__(
        self, model: Model, task: CircuitTask, orders: dict[int, Tensor], source: Source, memory_gb: float
    ) -> None:
        if source == "mean":
            raise GatelensError("attention edges have no mean: what is left out is put to corrupt or zero.")
        super().__init__(model, task, source, memory_gb)
        self.orders, self.total = orders, max(map(len, orders.values()))
        self._sources = lru_cache(maxsize=1)(self._make_source)

    def numbers_per_prompt(self, length: int) -> int:
        return 4 * attention_numbers(self.model, length)

    def counts(self, ks: Sequence[int]) -> list[float]:
        return [sum(min(k, len(order)) for order in self.orders.values()) / len(self.orders) for k in ks]

    def metric(self, batch: int, ks: Sequence[int], complement: bool = False) -> Tensor:
        bucket = self.batches[batch]
        length = bucket.clean.shape[1]
        shape = (self.model.n_layers, self.model.n_heads, length, length)
        size = shape[0] * shape[1] * length**2
        kept = [_top(self.orders[prompt], ks, size, complement) for prompt in bucket.which.tolist()]
        gates = torch.stack(kept, 1).unflatten(2, shape)
        logits = run_attention(self.model, bucket.clean, gates, self._sources(batch), memory_gb=self.memory_gb)
        return self.task.metric(logits, bucket)

    def shuffled(self, seed: int) -> AttentionCircuits:
        orders = {prompt: _shuffle(order, seed * 1_000_003 + prompt) for prompt, order in self.orders.items()}
        return AttentionCircuits(self.model, self.task, orders, self.source, self.memory_gb)

    def _make_source(self, batch: int) -> AttentionRun | None:
        return None if self.source == "zero" else capture_attention(self.model, self.batches[batch].corrupt)


def _top(order: Tensor, ks: Sequence[int], size: int, complement: bool) -> Tensor:
    """Which places the first k of an order take, or, for the complement, all others of it: bool (k, size)."""
    kept = torch.zeros(len(ks), size, dtype=torch.bool)
    for row, k in zip(kept, ks, strict=True):
        row[order[k:] if complement else order[:k]] = True
    return kept


def _shuffle(order: Tensor, seed: int) -> Tensor:
    return order.sort().values[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
