"""The component graph: which component's output can reach which component's input.

Sources are the embedding, every head and every MLP. Destinations are the q, k and v input of every head, the input of
every MLP, and the logits. Both are numbered in the order in which the model computes them, so the sources that
a destination reads are exactly those below some number. With grouped-query attention the k and v inputs belong to the
key-value head. Biases do not belong to an edge.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model.anatomy import Anatomy
from gatelens.model.components import Component


@dataclass(frozen=True)
class Graph:
    """The sources, destinations and edges of a model, as numbers and as names.

    Arguments:
        n_layers: number of layers.
        n_heads: query heads in each layer.
        n_kv_heads: key-value heads in each layer.
        parallel: True if attention and MLP of a layer read the same stream.
        coupled: True if a norm follows the output projection, so that the output of each head changes the scale of the
            other heads of its layer.

    Example:
        >>> Graph(12, 12, 12).n_edges  # GPT-2 small
        32491
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    parallel: bool = False
    coupled: bool = False

    @classmethod
    def of(cls, anatomy: Anatomy) -> Graph:
        """The graph of a model with this anatomy."""
        coupled = anatomy.family.after_attention is not None
        return cls(anatomy.n_layers, anatomy.n_heads, anatomy.n_kv_heads, anatomy.parallel, coupled)

    # Sources: the embedding; then, layer by layer, the heads and the MLP.

    @property
    def n_sources(self) -> int:
        """Number of sources."""
        return 1 + self.n_layers * (self.n_heads + 1)

    def heads(self, layer: int) -> slice:
        """The numbers of the sources that are the heads of a layer."""
        start = 1 + layer * (self.n_heads + 1)
        return slice(start, start + self.n_heads)

    def mlp(self, layer: int) -> int:
        """The number of the source that is the MLP of a layer."""
        return self.heads(layer).stop

    # Destinations: layer by layer, the heads' q, the KV heads' k, the KV heads' v and the MLP; then the logits.

    @property
    def n_destinations(self) -> int:
        """Number of destinations."""
        return self.n_layers * self._per_layer + 1

    @property
    def _per_layer(self) -> int:
        return self.n_heads + 2 * self.n_kv_heads + 1

    def attention_inputs(self, layer: int) -> slice:
        """The numbers of the destinations that are the q, k and v inputs of a layer, in this order."""
        start = layer * self._per_layer
        return slice(start, start + self._per_layer - 1)

    def mlp_input(self, layer: int) -> int:
        """The number of the destination that is the input of a layer's MLP."""
        return self.attention_inputs(layer).stop

    @property
    def logits(self) -> int:
        """The number of the destination that is the logits."""
        return self.n_destinations - 1

    # Edges

    @cached_property
    def reads(self) -> Tensor:
        """How many sources each destination can read: (destination,). It reads the sources with smaller numbers."""
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
        """Number of edges."""
        return int(self.reads.sum())

    def inputs_of(self, source: int) -> list[int]:
        """The destinations that are inputs of the component with this source number: none for the embedding.

        They are the inputs whose change changes the output of the component: of a head its q, k and v; of heads that a
        norm couples, the inputs of all heads of the layer.
        """
        if source == 0:
            return []
        layer, index = divmod(source - 1, self.n_heads + 1)
        if index == self.n_heads:
            return [self.mlp_input(layer)]
        inputs = self.attention_inputs(layer)
        if self.coupled:
            return list(range(inputs.start, inputs.stop))
        kv = inputs.start + self.n_heads + index * self.n_kv_heads // self.n_heads
        return [inputs.start + index, kv, kv + self.n_kv_heads]

    def is_key_or_value(self, destination: int) -> bool:
        """Whether a destination is a k or v input, which a head reads at other positions too."""
        place = destination % self._per_layer
        return destination != self.logits and self.n_heads <= place < self._per_layer - 1

    def random_path(self, generator: torch.Generator) -> list[tuple[int, int]]:
        """The edges (source, destination) of a random path, from the logits down to the embedding.

        Each step chooses among all edges into a destination, then among the inputs of the component that was reached.
        """
        path: list[tuple[int, int]] = []
        destination = self.logits
        while True:
            sources = self.edges[:, destination].nonzero()[:, 0]
            source = int(sources[torch.randint(len(sources), (1,), generator=generator)])
            path.append((source, destination))
            if source == 0:
                return path
            inputs = self.inputs_of(source)
            destination = inputs[int(torch.randint(len(inputs), (1,), generator=generator))]

    def on_a_path(self, circuits: Tensor, sees: Tensor | None = None) -> Tensor:
        """Remove the edges of circuits that are not on a path from the embedding to the logits.

        The removed edges have no effect: a component that cannot be reached from the embedding stays at its corrupt
        value, and a component that does not reach the logits cannot change them. The heads of a layer that are coupled
        by a norm count as one component here.

        If edges have a gate for each role of positions, a path starts at the embedding at any role and ends at the
        logits at the last role. Only heads move it to another role: from a k or v input at one role to the head's
        output at a role that sees it.

        Arguments:
            circuits: bool (row, source, destination) or (row, role, source, destination), the edges of each circuit.
            sees: bool (role, other role), whether a position of the other role is visible to one of the role; only if
                the circuits have roles.

        Returns:
            bool, with the shape of the circuits: the edges that are on a path.
        """
        if sees is None:
            return self.on_a_path(circuits[:, None], torch.ones(1, 1, dtype=torch.bool))[:, 0]
        sees = sees.to(circuits.device)
        circuits = circuits & self.edges.to(circuits.device)
        # 1. Forwards: the sources that the embedding reaches.
        reached = torch.zeros(circuits.shape[:-1], dtype=torch.bool, device=circuits.device)
        reached[..., 0] = True
        for layer in range(self.n_layers):
            inputs = (circuits[..., self.attention_inputs(layer)] & reached[..., None]).any(-2)
            reached[..., self.heads(layer)] = self._heads_of_inputs(inputs, sees)
            reached[..., self.mlp(layer)] = (circuits[..., self.mlp_input(layer)] & reached).any(-1)
        # 2. Backwards: the destinations that reach the logits. This order is also right for parallel blocks, whose MLP
        # does not read the heads of its layer.
        useful = torch.zeros_like(circuits[..., 0, :])
        useful[:, -1, self.logits] = True
        for layer in reversed(range(self.n_layers)):
            useful[..., self.mlp_input(layer)] = (circuits[..., self.mlp(layer), :] & useful).any(-1)
            heads = (circuits[..., self.heads(layer), :] & useful[..., None, :]).any(-1)
            useful[..., self.attention_inputs(layer)] = self._inputs_of_heads(heads, sees)
        return circuits & reached[..., None] & useful[..., None, :]

    def _heads_of_inputs(self, inputs: Tensor, sees: Tensor) -> Tensor:
        """Which heads have at least one input that is set: (row, role, q k v inputs) -> (row, role, head)."""
        q, k, v = inputs.split([self.n_heads, self.n_kv_heads, self.n_kv_heads], -1)
        heads = q | _any_of(sees, k | v).repeat_interleave(self.n_heads // self.n_kv_heads, -1)
        return heads.any(-1, keepdim=True) if self.coupled else heads

    def _inputs_of_heads(self, heads: Tensor, sees: Tensor) -> Tensor:
        """Which inputs belong to at least one head that is set: (row, role, head) -> (row, role, q k v inputs)."""
        if self.coupled:
            heads = heads.any(-1, keepdim=True).expand_as(heads)
        shared = _any_of(sees.T, heads.unflatten(-1, (self.n_kv_heads, -1)).any(-1))
        return torch.cat([heads, shared, shared], -1)

    # Graphs in which every head has its own k and v input, as other packages count them

    @cached_property
    def by_query_head(self) -> Tensor:
        """For each destination of the same graph without shared inputs, the number of our destination: (column,).

        The columns are the q, k and v inputs of every head and the MLP's input, layer by layer, and the logits. A k or
        v input that several heads share occurs once for each of them.
        """
        group = self.n_heads // self.n_kv_heads
        columns: list[Tensor] = []
        for layer in range(self.n_layers):
            inputs = torch.arange(self.n_destinations)[self.attention_inputs(layer)]
            q, k, v = inputs.split([self.n_heads, self.n_kv_heads, self.n_kv_heads])
            columns += [q, k.repeat_interleave(group), v.repeat_interleave(group)]
            columns.append(torch.tensor([self.mlp_input(layer)]))
        return torch.cat([*columns, torch.tensor([self.logits])])

    @cached_property
    def n_sharing(self) -> Tensor:
        """How many heads share each destination: (destination,). It is 1 except for shared k and v inputs."""
        return self.by_query_head.bincount(minlength=self.n_destinations)

    # Names

    @cached_property
    def source_names(self) -> list[str]:
        """The names of the sources: ``embed``, ``L3H7``, ``M3``."""
        names = ["embed"]
        for layer in range(self.n_layers):
            names += [str(Component(layer, "H", head)) for head in range(self.n_heads)]
            names.append(str(Component(layer, "M")))
        return names

    @cached_property
    def destination_names(self) -> list[str]:
        """The names of the destinations: ``L3H7.q``, ``L3H7.k``, ``L3H7.v``, ``M3``, ``logits``.

        With grouped-query attention the k and v inputs are named after the key-value head: ``L3KV2.k``.
        """
        kv_kind: Literal["H", "KV"] = "H" if self.n_kv_heads == self.n_heads else "KV"
        names: list[str] = []
        for layer in range(self.n_layers):
            names += [f"{Component(layer, 'H', head)}.q" for head in range(self.n_heads)]
            names += [f"{Component(layer, kv_kind, head)}.k" for head in range(self.n_kv_heads)]
            names += [f"{Component(layer, kv_kind, head)}.v" for head in range(self.n_kv_heads)]
            names.append(str(Component(layer, "M")))
        return [*names, "logits"]

    def edge(self, name: str) -> tuple[int, int]:
        """Look up an edge by its name.

        Arguments:
            name: source and destination, written like ``L3H7 -> L5H2.q``.

        Returns:
            The numbers of the source and of the destination. If there is no such edge, a `GatelensError` is raised.
        """
        ends = [end.strip() for end in name.split("->")]
        if len(ends) == 2 and ends[0] in self.source_names and ends[1] in self.destination_names:
            edge = self.source_names.index(ends[0]), self.destination_names.index(ends[1])
            if self.edges[edge]:
                return edge
        raise GatelensError(
            f"no edge '{name}': an edge is written like '{self.source_names[0]} -> {self.destination_names[0]}', "
            f"and its source is computed before its destination. This model has {self.n_edges:,} edges."
        )


def _any_of(related: Tensor, values: Tensor) -> Tensor:
    """For each role, whether a value is set at any related role: (role, other), (row, other, n) -> (row, role, n)."""
    return (related.float() @ values.float()) > 0
