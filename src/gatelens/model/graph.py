"""The component graph: which component's output can reach which component's input.

Sources are the embedding, every head and every MLP; destinations are every head's q, k and v input, every MLP's
input and the logits. Both are numbered in the order in which the model computes them, so a destination reads
exactly the sources below some number. Where keys and values are shared between heads (grouped-query attention), the
k and v inputs belong to the KV head. Biases belong to no edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.anatomy import Anatomy, Head


@dataclass(frozen=True)
class Graph:
    """Sources and destinations of a model of this shape, as numbers and as names."""

    n_layers: int
    n_heads: int
    n_kv_heads: int
    parallel: bool = False  # attention and MLP of a layer read the same stream
    coupled: bool = False  # a norm after the output projection lets each head of a layer scale the others

    @classmethod
    def of(cls, anatomy: Anatomy) -> Graph:
        coupled = anatomy.family.after_attention is not None
        return cls(anatomy.n_layers, anatomy.n_heads, anatomy.n_kv_heads, anatomy.parallel, coupled)

    # Sources: the embedding; then, layer by layer, the heads and the MLP.

    @property
    def n_sources(self) -> int:
        return 1 + self.n_layers * (self.n_heads + 1)

    def heads(self, layer: int) -> slice:
        """The sources that are this layer's heads."""
        start = 1 + layer * (self.n_heads + 1)
        return slice(start, start + self.n_heads)

    def mlp(self, layer: int) -> int:
        """The source that is this layer's MLP."""
        return self.heads(layer).stop

    # Destinations: layer by layer, the heads' q, the KV heads' k, the KV heads' v and the MLP; then the logits.

    @property
    def n_destinations(self) -> int:
        return self.n_layers * self._per_layer + 1

    @property
    def _per_layer(self) -> int:
        return self.n_heads + 2 * self.n_kv_heads + 1

    def attention_inputs(self, layer: int) -> slice:
        """The destinations that are this layer's q, k and v inputs, in this order."""
        start = layer * self._per_layer
        return slice(start, start + self._per_layer - 1)

    def mlp_input(self, layer: int) -> int:
        return self.attention_inputs(layer).stop

    @property
    def logits(self) -> int:
        return self.n_destinations - 1

    # Edges

    @cached_property
    def reads(self) -> Tensor:
        """How many sources each destination can read: (destination,). It reads those numbered below."""
        counts: list[int] = []
        for layer in range(self.n_layers):
            before = self.heads(layer).start
            counts += [before] * (self._per_layer - 1)
            counts.append(before if self.parallel else before + self.n_heads)
        return torch.tensor([*counts, self.n_sources])

    @cached_property
    def edges(self) -> Tensor:
        """Where there is an edge: bool (source, destination)."""
        return torch.arange(self.n_sources)[:, None] < self.reads[None, :]

    @property
    def n_edges(self) -> int:
        return int(self.reads.sum())

    def on_a_path(self, kept: Tensor) -> Tensor:
        """Of the kept edges, those on some path from the embedding to the logits: bool (row, source, destination).

        The others carry nothing: what cannot be reached from the embedding stays at its corrupt value, and what
        does not reach the logits cannot change them. Heads that are coupled count as one here.
        """
        kept = kept & self.edges.to(kept.device)
        live = torch.zeros(len(kept), self.n_sources, dtype=torch.bool, device=kept.device)
        live[:, 0] = True
        for layer in range(self.n_layers):
            live[:, self.heads(layer)] = self._by_head(self._reached(kept, live, self.attention_inputs(layer)))
            mlp = self.mlp_input(layer)
            live[:, self.mlp(layer)] = self._reached(kept, live, slice(mlp, mlp + 1))[:, 0]
        useful = torch.zeros(len(kept), self.n_destinations, dtype=torch.bool, device=kept.device)
        useful[:, self.logits] = True
        for layer in reversed(range(self.n_layers)):
            written = (kept[:, self.heads(layer).start : self.mlp(layer) + 1] & useful[:, None]).any(2)
            useful[:, self.mlp_input(layer)] = written[:, -1]
            # A parallel block's MLP does not read its heads, so one order serves both kinds of block.
            written = (kept[:, self.heads(layer)] & useful[:, None]).any(2)
            useful[:, self.attention_inputs(layer)] = self._by_input(written)
        return kept & live[:, :, None] & useful[:, None, :]

    def _reached(self, kept: Tensor, live: Tensor, destinations: slice) -> Tensor:
        return (kept[:, :, destinations] & live[:, :, None]).any(1)

    def _by_head(self, inputs: Tensor) -> Tensor:
        """Any of a head's three inputs: (row, q k v inputs) -> (row, head)."""
        if self.coupled:
            return inputs.any(1, keepdim=True)
        q, k, v = inputs.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], 1)
        group = self.n_heads // self.n_kv_heads
        return q | (k | v).repeat_interleave(group, 1)

    def _by_input(self, heads: Tensor) -> Tensor:
        """Any of the heads behind an input: (row, head) -> (row, q k v inputs)."""
        if self.coupled:
            return heads.any(1, keepdim=True)
        shared = heads.unflatten(1, (self.n_kv_heads, -1)).any(2)
        return torch.cat([heads, shared, shared], 1)

    # Names

    @cached_property
    def source_names(self) -> list[str]:
        """``embed``, ``L3H7``, ``M3``."""
        names = ["embed"]
        for layer in range(self.n_layers):
            names += [str(Head(layer, head)) for head in range(self.n_heads)]
            names.append(f"M{layer}")
        return names

    @cached_property
    def destination_names(self) -> list[str]:
        """``L3H7.q``, ``L3H7.k``, ``L3H7.v``, ``M3``, ``logits``; k and v of shared keys: ``L3KV2.k``."""
        shared = self.n_kv_heads != self.n_heads
        names: list[str] = []
        for layer in range(self.n_layers):
            names += [f"{Head(layer, head)}.q" for head in range(self.n_heads)]
            for kind in "kv":
                names += [f"L{layer}{'KV' if shared else 'H'}{head}.{kind}" for head in range(self.n_kv_heads)]
            names.append(f"M{layer}")
        return [*names, "logits"]

    def edge(self, name: str) -> tuple[int, int]:
        """The numbers of an edge written ``L3H7 -> L5H2.q``."""
        parts = [part.strip() for part in name.split("->")]
        if len(parts) == 2 and parts[0] in self.source_names and parts[1] in self.destination_names:
            found = self.source_names.index(parts[0]), self.destination_names.index(parts[1])
            if self.edges[found]:
                return found
        raise GatelensError(
            f"no edge '{name}': an edge is written like '{self.source_names[0]} -> {self.destination_names[0]}', "
            f"from a source that is computed before its destination. There are {self.n_edges:,}."
        )
