"""Attribution of all edges between components at once (EAP, Syed et al., arXiv 2310.10348).

The score of an edge is (clean - corrupt output of the source) . d metric / d input of the destination. The products of
all sources with all destinations are matrix products over prompts, positions and width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Shaped
from torch import Tensor

from gatelens.gates.edge_runs import hook_sources, new_sources
from gatelens.gates.gradients import InputGradients, Metric, differentiate
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import forward
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.sparse.in_model import offset_modules
from gatelens.tasks.base import Bucket

_DESTINATIONS_AT_ONCE = 96


class EdgeAttribution:
    """EAP on one batch: the differences of all sources, multiplied by the gradient of each destination."""

    def __init__(self, model: Model, batch: Bucket, metric: Metric) -> None:
        self.model, self.batch, self.metric = model, batch, metric
        self.graph = Graph.of(model.anatomy)
        self.differences = new_sources(model, batch.clean)  # clean - corrupt output: (source, prompt, position, width)
        # The products read all differences once for each group of layers, so a group has many destinations. All groups
        # use the same memory for the gradients at their inputs.
        self.per_layer = self.graph.mlp_input(0) + 1
        self.layers_at_once = max(1, _DESTINATIONS_AT_ONCE // self.per_layer)
        self.inputs = self.differences.new_empty(self.layers_at_once * self.per_layer, *self.differences.shape[1:])
        self.sums = self.differences.new_zeros(self.graph.n_sources, self.graph.n_destinations)

    def scores(self, points: Sequence[float]) -> Shaped[Tensor, "source destination"]:
        """The score of every edge, summed over the prompts of the batch; 0 where there is no edge.

        Arguments:
            points: where gradients are taken on the path of embeddings from corrupt (0) to clean (1), and averaged.
        """
        # 1. The corrupt run, stored in the memory of the differences.
        with torch.no_grad(), Hooks() as hooks:
            hook_sources(self.model, hooks, self._keep)
            forward(self.model, self.batch.corrupt, None, hooks, "last")
        corrupt_embedding = self.differences[0].clone()
        # 2. The clean run turns it into differences. If the only point is the clean end, it also gives the gradients.
        if list(points) == [1.0]:
            self._add_products(subtracting=True)
            return self._only_edges()
        with torch.no_grad(), Hooks() as hooks:
            hook_sources(self.model, hooks, self._subtract_from)
            forward(self.model, self.batch.clean, None, hooks, "last")
        # 3. Gradients at the points of the path of embeddings.
        for point in points:
            self._add_products(embedding=corrupt_embedding + point * self.differences[0])
        return self._only_edges() / len(points)

    def _only_edges(self) -> Tensor:
        return self.sums * self.graph.edges.to(self.sums.device)

    def _keep(self, start: int, outputs: Tensor) -> None:
        self.differences[start : start + len(outputs)].copy_(outputs)

    def _subtract_from(self, start: int, outputs: Tensor) -> None:
        corrupt = self.differences[start : start + len(outputs)]
        torch.sub(outputs.to(corrupt), corrupt, out=corrupt)

    def _add_products(self, embedding: Tensor | None = None, subtracting: bool = False) -> None:
        gradients = InputGradients()

        def watch(hooks: Hooks) -> None:
            if subtracting:
                hook_sources(self.model, hooks, self._subtract_from)
            gradients.watch(self.model, hooks)

        differentiate(self.model, self.batch.clean, self.metric, watch, embedding)
        for first in range(0, self.graph.n_layers, self.layers_at_once):
            self._add_layers(range(first, min(first + self.layers_at_once, self.graph.n_layers)), gradients)
        # The metric reads the last position only, so the gradient of the logits is zero at all others.
        final = gradients.final[0][None, :, -1:].to(self.inputs, copy=True)
        self.model.anatomy.final_norm.pull_back(final, gradients.finals[0][:, -1:].to(final.device))
        self.sums[:, self.graph.logits] += self.differences[:, :, -1:].flatten(1) @ final.flatten()

    def _add_layers(self, layers: range, gradients: InputGradients) -> None:
        """Products of all sources with the inputs of some layers."""
        start = self.graph.attention_inputs(layers[0]).start
        destinations = slice(start, self.graph.mlp_input(layers[-1]) + 1)
        for layer in layers:
            offset = self.graph.attention_inputs(layer).start - start
            self._pull_back(layer, gradients, self.inputs[offset : offset + self.per_layer])
        # The layers of a group do not all read the same sources; products that are not edges are removed at the end.
        n_sources = int(self.graph.reads[destinations].max())
        inputs = self.inputs[: destinations.stop - destinations.start]
        self.sums[:n_sources, destinations] += self.differences[:n_sources].flatten(1) @ inputs.flatten(1).T

    def _pull_back(self, layer: int, gradients: InputGradients, into: Tensor) -> None:
        """Gradients at a layer's q, k, v and MLP inputs, before the norms: (destination, prompt, position, width)."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        projected = anatomy.unfuse([gradients.qkv[layer][i] for i in range(len(block.qkv))])
        start = 0
        for projection, gradient in zip(anatomy.projections(block), projected, strict=True):
            stop = start + len(projection.weight)
            by_head = gradient.flatten(0, 1).transpose(0, 1).to(into)
            torch.bmm(by_head, projection.weight.to(into), out=into[start:stop].flatten(1, 2))
            start = stop
        self._add_offsets(layer, gradients, into)
        into[start] = gradients.mlp[layer].to(into)
        block.before_attention.pull_back(into[:start], gradients.streams[layer].to(into.device))
        block.before_mlp.pull_back(into[start:], gradients.mlp_streams[layer].to(into.device))

    def _add_offsets(self, layer: int, gradients: InputGradients, into: Tensor) -> None:
        """Add what the q and k inputs receive through the offsets of a sparse model's gates, if they have any."""
        anatomy, block = self.model.anatomy, self.model.anatomy.blocks[layer]
        start = 0
        for i, (module, n) in enumerate(
            zip(offset_modules(block.attention) or (), (anatomy.n_heads, anatomy.n_kv_heads), strict=False)
        ):
            gradient = gradients.offsets[layer][i].to(into).unflatten(-1, (n, -1))  # (prompt, position, input, head)
            weight = module.weight.to(into).unflatten(0, (n, -1))  # (input, head, width)
            into[start : start + n] += torch.einsum("psng,ngw->npsw", gradient, weight)
            start += n
