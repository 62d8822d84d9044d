"""Score gates by gradients: all of them for the price of a few runs.

The score of a gate is ``(clean - corrupt contribution) . d metric / d destination input``, on the clean run
(attribution patching; EAP for edges: Syed et al., arXiv 2310.10348), or with the gradient averaged over points of the
straight path of input embeddings from corrupt to clean, midpoint rule (EAP-IG: Hanna et al., arXiv 2403.17806).
Prompts are summed and divided once, so scores do not depend on how they are split into batches.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from gatelens.gates.attention import AttentionRun, attention_numbers, capture_attention
from gatelens.gates.edges import copy_into, hook_sources, new_sources
from gatelens.gates.gradients import InputGradients, Metric, differentiate, midpoints, z_gradients
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import Run, capture, forward, gradient_numbers
from gatelens.gates.scores import AttentionScores, EdgeScores, HeadScores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.journal import Journal
from gatelens.runtime.precision import widen
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches, join


def attribute_heads(
    model: Model, task: CircuitTask, steps: int = 1, *, memory_gb: float = 2.0, journal: Journal | None = None
) -> HeadScores:
    """Every head's score: (clean z - corrupt z) . d metric / d z. Cost: 2 forwards, ``steps`` forward-backwards."""
    journal = journal or Journal()
    points = midpoints(steps)
    parts = batches(task, lambda length: gradient_numbers(model, length), memory_gb)
    journal.begin("score heads", len(parts))

    def score(batch: Bucket) -> Tensor:
        clean, corrupt = capture(model, batch.clean), capture(model, batch.corrupt)
        scores = torch.zeros(model.n_layers, model.n_heads, dtype=model.wide_dtype)
        for alpha in points:
            grads = z_gradients(model, batch.clean, _metric(task, batch), _on_path(clean, corrupt, alpha))
            for layer, grad in enumerate(grads):
                change = widen(clean.heads[layer]) - widen(corrupt.heads[layer])
                scores[layer] += torch.einsum("bthd,bthd->h", change, widen(grad)).cpu() / steps
        return scores

    pieces = [journal.piece(f"heads-{i}", partial(score, batch)) for i, batch in enumerate(parts)]
    return HeadScores(torch.stack(pieces).sum(0) / len(task), _name(steps))


def attribute_attention(
    model: Model, task: CircuitTask, steps: int = 1, *, memory_gb: float = 2.0, journal: Journal | None = None
) -> AttentionScores:
    """The score of every attention edge of every prompt: (p_ij v_j - corrupt p_ij v_j) . d metric / d z_i.

    Cost: 4 forwards and ``steps`` forward-backwards; memory of (T, T) per head.
    """
    journal = journal or Journal()
    points = midpoints(steps)
    parts = batches(task, lambda length: gradient_numbers(model, length) + attention_numbers(model, length), memory_gb)
    journal.begin("score attention edges", len(parts))

    def score(batch: Bucket) -> Tensor:
        clean, corrupt = capture(model, batch.clean), capture(model, batch.corrupt)
        clean_attention, corrupt_attention = (
            capture_attention(model, batch.clean),
            capture_attention(model, batch.corrupt),
        )
        edges = clean_attention.edges | corrupt_attention.edges  # closed in both runs, an edge is none
        scores = torch.zeros(edges.shape, dtype=model.wide_dtype)
        for alpha in points:
            grads = z_gradients(model, batch.clean, _metric(task, batch), _on_path(clean, corrupt, alpha))
            scores += (_along(clean_attention, grads) - _along(corrupt_attention, grads)) / steps
        return torch.stack([scores, edges.to(scores)], 1)

    pieces = [journal.piece(f"attention-{i}", partial(score, batch)) for i, batch in enumerate(parts)]
    joined = join(task, pieces)
    return AttentionScores([piece[:, 0] for piece in joined], [piece[:, 1].bool() for piece in joined], _name(steps))


def attribute_edges(
    model: Model, task: CircuitTask, steps: int = 1, *, memory_gb: float = 2.0, journal: Journal | None = None
) -> EdgeScores:
    """The score of every edge between components: EAP for one step, EAP-IG for several.

    Cost: 2 forwards, ``steps`` forward-backwards (one step shares the clean forward), and the products.
    """
    journal = journal or Journal()
    midpoints(steps)
    graph = Graph.of(model.anatomy)
    room = (graph.n_sources + 128) * model.anatomy.width
    parts = batches(task, lambda length: gradient_numbers(model, length) + room * length, memory_gb)
    journal.begin("score edges", len(parts))

    def score(batch: Bucket) -> Tensor:
        return _EdgeAttribution(model, graph, task, batch).scores(steps)

    pieces = [journal.piece(f"edges-{i}", partial(score, batch)) for i, batch in enumerate(parts)]
    return EdgeScores(torch.stack(pieces).sum(0) / len(task), graph, _name(steps))


class _EdgeAttribution:
    """EAP of one batch of prompts: differences of all sources, then products with each destination's gradient."""

    def __init__(self, model: Model, graph: Graph, task: CircuitTask, batch: Bucket) -> None:
        self.model, self.graph, self.batch, self.metric = model, graph, batch, _metric(task, batch)
        self.differences = new_sources(model, batch.clean)  # clean - corrupt output: (source, prompt, position, width)
        # Gradients at the inputs of some layers. The products read all differences once for each such group, so a group
        # has many destinations; the same room serves every group.
        self.per_layer = graph.mlp_input(0) + 1
        self.layers_at_once = max(1, 96 // self.per_layer)
        self.room = self.differences.new_empty(self.layers_at_once * self.per_layer, *self.differences.shape[1:])
        self.sums = self.differences.new_zeros(graph.n_sources, graph.n_destinations)

    def scores(self, steps: int) -> Tensor:
        """Sum over the batch's prompts: (source, destination)."""
        # 1. The corrupt run, in the place of the differences.
        with torch.no_grad(), Hooks() as hooks:
            hook_sources(self.model, hooks, self._keep)
            forward(self.model, self.batch.corrupt, None, hooks, "last")
        corrupt = self.differences[0].clone()
        # 2. The clean run turns them into differences; for plain EAP it also gives the gradients.
        if steps == 1:
            self._add_products(subtracting=True)
            return self.sums * self.graph.edges.to(self.sums.device)
        with torch.no_grad(), Hooks() as hooks:
            hook_sources(self.model, hooks, self._subtract_from)
            forward(self.model, self.batch.clean, None, hooks, "last")
        # 3. Gradients at the points of the path of embeddings.
        for alpha in midpoints(steps):
            self._add_products(embedding=corrupt + alpha * self.differences[0])
        return self.sums * self.graph.edges.to(self.sums.device) / steps

    def _keep(self, start: int, outputs: Tensor) -> None:
        copy_into(self.differences[start : start + len(outputs)], outputs)

    def _subtract_from(self, start: int, outputs: Tensor) -> None:
        there = self.differences[start : start + len(outputs)]
        torch.sub(outputs.to(there), there, out=there)

    def _add_products(self, embedding: Tensor | None = None, subtracting: bool = False) -> None:
        found = InputGradients()

        def watch(hooks: Hooks) -> None:
            if subtracting:
                hook_sources(self.model, hooks, self._subtract_from)
            found.watch(self.model, hooks)

        differentiate(self.model, self.batch.clean, self.metric, watch, embedding)
        for first in range(0, self.graph.n_layers, self.layers_at_once):
            layers = range(first, min(first + self.layers_at_once, self.graph.n_layers))
            destinations = slice(self.graph.attention_inputs(layers[0]).start, self.graph.mlp_input(layers[-1]) + 1)
            for layer in layers:
                start = self.graph.attention_inputs(layer).start - destinations.start
                self._pull_back(layer, found, self.room[start : start + self.per_layer])
            # The layers of a group do not all read the same sources; what is no edge is taken out in the end.
            n = int(self.graph.reads[destinations].max())
            gradients = self.room[: destinations.stop - destinations.start]
            self.sums[:n, destinations] += self.differences[:n].flatten(1) @ gradients.flatten(1).T
        # The metric reads the last position only, so the logits' gradient is zero elsewhere.
        final = found.final[0][None, :, -1:].to(self.room, copy=True)
        self.model.anatomy.final_norm.pull_back(final, found.finals[0][:, -1:].to(final.device))
        self.sums[:, self.graph.logits] += self.differences[:, :, -1:].flatten(1) @ final.flatten()

    def _pull_back(self, layer: int, found: InputGradients, into: Tensor) -> None:
        """Gradients at a layer's q, k, v and MLP inputs, before the norms: (destination, prompt, position, width)."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        grads = anatomy.unfuse([found.qkv[layer][i] for i in range(len(block.qkv))])
        at = 0
        for projection, grad in zip(anatomy.projections(block), grads, strict=True):
            stop = at + len(projection.weight)
            by_head = grad.flatten(0, 1).transpose(0, 1).to(into)
            torch.bmm(by_head, projection.weight.to(into), out=into[at:stop].flatten(1, 2))
            at = stop
        into[at] = found.mlp[layer].to(into)
        block.before_attention.pull_back(into[:at], found.streams[layer].to(into.device))
        block.before_mlp.pull_back(into[at:], found.mlp_streams[layer].to(into.device))


def _metric(task: CircuitTask, batch: Bucket) -> Metric:
    return lambda logits: task.metric(logits, batch)


def _on_path(clean: Run, corrupt: Run, alpha: float) -> Tensor:
    return corrupt.streams[0] + alpha * (clean.streams[0] - corrupt.streams[0])


def _along(run: AttentionRun, grads: list[Tensor]) -> Tensor:
    """p_ij v_j . (gradient at z_i) for every edge: (prompt, layer, head, query, key)."""
    layers = [
        widen(p) * torch.einsum("bihd,bhjd->bhij", widen(grad), widen(v))
        for p, v, grad in zip(run.weights, run.values, grads, strict=True)
    ]
    return torch.stack([layer.cpu() for layer in layers], 1)


def _name(steps: int) -> str:
    return "eap" if steps == 1 else f"eap-ig ({steps} steps)"
