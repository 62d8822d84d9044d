"""Edges into queries and keys, with the softmax computed exactly (AtP*: Kramár et al., arXiv 2403.00745).

Closing an edge into a head's queries moves them to ``q(x - (clean - corrupt output of the source))``, with the norm and
the projection computed exactly. The attention weights follow, and the metric changes by about
``sum over i, j of (p_ij - changed p_ij) v_j . d metric / d z_i``. Edges into keys are treated in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gatelens.gates.attention_runs import capture_attention, weights_from
from gatelens.gates.attribution import SoftmaxProducts
from gatelens.gates.gradients import keep
from gatelens.gates.hooks import Hooks
from gatelens.gates.runs import repeat
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.precision import widen
from gatelens.sparse.attention_interface import offset_modules

_SOURCES_AT_ONCE = 16


class QueryKeyEdges:
    """The edges into the queries and keys of one batch. Two forwards' worth of projections for each source and layer.

    Arguments:
        tokens: the clean prompts.
        differences: clean - corrupt output of every source.
    """

    def __init__(
        self, model: Model, tokens: Tensor, differences: Shaped[Tensor, "source prompt position width"]
    ) -> None:
        self.model, self.tokens, self.differences = model, tokens, differences
        self.graph = Graph.of(model.anatomy)
        self.streams: dict[int, Tensor] = {}  # the input of each layer
        with Hooks() as hooks:
            for layer, block in enumerate(model.anatomy.blocks):
                hooks.before(block.layer, keep(self.streams, layer))
            self.run = capture_attention(model, tokens)

    def products(
        self, z_gradients: Sequence[Mapping[int, Float[Tensor, "prompt position _"]]]
    ) -> Iterator[SoftmaxProducts]:
        """The products of all edges into the queries and the keys of one layer at a time, for each pass."""
        for layer in range(self.graph.n_layers):
            values = self._values(layer, [gradients.get(layer) for gradients in z_gradients])
            sources = range(int(self.graph.reads[self.graph.attention_inputs(layer).start]))
            start = self.graph.attention_inputs(layer).start
            middle, stop = start + self.graph.n_heads, start + self.graph.n_heads + self.graph.n_kv_heads
            for first in range(0, len(sources), _SOURCES_AT_ONCE):
                part = slice(first, min(first + _SOURCES_AT_ONCE, len(sources)))
                for inputs, weights in zip(
                    (slice(start, middle), slice(middle, stop)), self._changed_weights(layer, part), strict=True
                ):
                    by_head = torch.einsum("sphij,aphij->apsh", self._lost(layer, weights), values)
                    groups = by_head.unflatten(-1, (inputs.stop - inputs.start, -1)).sum(-1)  # heads that share a key
                    yield SoftmaxProducts((slice(None), part, inputs), groups)

    @torch.no_grad()
    def _values(self, layer: int, gradients: Sequence[Tensor | None]) -> Float[Tensor, "_pass prompt head query key"]:
        """What the weight of each attention edge is worth: v_j . (gradient at z_i); 0 for a pass without gradients."""
        v = widen(self.run.values[layer])
        worth = v.new_zeros(len(gradients), *self.run.weights[layer].shape)
        for i, gradient in enumerate(gradients):
            if gradient is not None:
                by_head = widen(gradient).unflatten(-1, (self.graph.n_heads, -1))
                worth[i] = torch.einsum("pihd,phjd->phij", by_head, v)
        return worth

    def _lost(self, layer: int, weights: Tensor) -> Float[Tensor, "source prompt head query key"]:
        """Clean attention weights minus those without each source."""
        return widen(self.run.weights[layer]) - widen(weights).unflatten(0, (-1, len(self.tokens)))

    @torch.no_grad()
    def _changed_weights(self, layer: int, sources: slice) -> tuple[Tensor, Tensor]:
        """The attention weights without some sources, one at a time, in the queries, and then in the keys."""
        anatomy, rows, stream = self.model.anatomy, sources.stop - sources.start, self.streams[layer]
        clean = [repeat(part, rows) for part in self._parts(layer, stream)]
        changed = self._parts(layer, (widen(stream) - self.differences[sources]).to(stream.dtype).flatten(0, 1))
        *offsets, q, k, v = clean
        *changed_offsets, changed_q, changed_k, _ = changed
        in_queries = [*changed_offsets[:1], *offsets[1:], *anatomy.fuse(changed_q, k, v)]
        in_keys = [*offsets[:1], *changed_offsets[1:], *anatomy.fuse(q, changed_k, v)]
        return (
            weights_from(self.model, self.tokens, layer, in_queries, rows),
            weights_from(self.model, self.tokens, layer, in_keys, rows),
        )

    def _parts(self, layer: int, stream: Tensor) -> list[Tensor]:
        """The gate offsets of queries and of keys, if there are any, and q, k and v, each (_, position, head, dim)."""
        block = self.model.anatomy.blocks[layer]
        normed = block.before_attention(stream)
        offsets = [module(normed) for module in offset_modules(block.attention) or ()]
        return [*offsets, *self.model.anatomy.unfuse([module(normed) for module in block.qkv])]
