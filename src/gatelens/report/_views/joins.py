"""When each edge of a ranking becomes part of a circuit: the page moves a slider over the number of edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatelens.model.graph import Graph

RankedEdge = tuple[int, ...]
"""The numbers of a source and a destination, or of a role, a source and a destination."""


def joins(graph: Graph, ranked: Sequence[RankedEdge], sees: Tensor | None = None) -> list[int]:
    """For each edge, the smallest k such that it is on a path from the embedding to the logits in the top k edges.

    A path exists as soon as its lowest-ranked edge is included, so a component joins with the path to it whose
    lowest-ranked edge has the best rank. `Graph.on_a_path` says what a path is if edges have roles.

    Arguments:
        ranked: the first edges of a ranking, best first.
        sees: bool (role, other role), whether the other role is visible to the role; only if edges have roles.

    Returns:
        One number per edge, in the order of the ranking; 0 if that takes more edges than are given.
    """
    never = len(ranked) + 1
    sees = torch.ones(1, 1, dtype=torch.bool) if sees is None else sees.cpu()
    columns = torch.tensor(list(ranked)).T
    roles, sources, destinations = columns if len(columns) == 3 else (torch.zeros_like(columns[0]), *columns)
    ranks = torch.full((len(sees), graph.n_sources, graph.n_destinations), never)
    ranks[roles, sources, destinations] = torch.arange(1, never)
    # 1. Forwards: when the embedding reaches each source, at each role.
    reached = torch.full((len(sees), graph.n_sources), never)
    reached[:, 0] = 0
    for layer in range(graph.n_layers):
        inputs = torch.maximum(ranks[..., graph.attention_inputs(layer)], reached[..., None]).amin(1)
        reached[:, graph.heads(layer)] = _by_head(graph, inputs, sees, never)
        reached[:, graph.mlp(layer)] = torch.maximum(ranks[..., graph.mlp_input(layer)], reached).amin(1)
    # 2. Backwards: when each destination reaches the logits at the last role.
    useful = torch.full((len(sees), graph.n_destinations), never)
    useful[-1, graph.logits] = 0
    for layer in reversed(range(graph.n_layers)):
        useful[:, graph.mlp_input(layer)] = torch.maximum(ranks[:, graph.mlp(layer)], useful).amin(1)
        heads = torch.maximum(ranks[:, graph.heads(layer)], useful[:, None]).amin(2)
        useful[:, graph.attention_inputs(layer)] = _by_input(graph, heads, sees, never)
    # 3. An edge joins when it is included, its source is reached and its destination is useful.
    joined = torch.stack(
        [ranks[roles, sources, destinations], reached[roles, sources], useful[roles, destinations]]
    ).amax(0)
    return torch.where(joined < never, joined, 0).tolist()


def _by_head(graph: Graph, inputs: Tensor, sees: Tensor, never: int) -> Tensor:
    """When the first of a head's inputs is reached: (role, input) -> (role, head). Coupled heads count as one."""
    q, k, v = inputs.split([graph.n_heads, graph.n_kv_heads, graph.n_kv_heads], -1)
    seen = _first_of(sees, torch.minimum(k, v), never).repeat_interleave(graph.n_heads // graph.n_kv_heads, -1)
    heads = torch.minimum(q, seen)
    return heads.amin(-1, keepdim=True) if graph.coupled else heads


def _by_input(graph: Graph, heads: Tensor, sees: Tensor, never: int) -> Tensor:
    """When the first of the heads behind an input becomes useful: (role, head) -> (role, input)."""
    if graph.coupled:
        heads = heads.amin(-1, keepdim=True).expand_as(heads)
    shared = _first_of(sees.T, heads.unflatten(-1, (graph.n_kv_heads, -1)).amin(-1), never)
    return torch.cat([heads, shared, shared], -1)


def _first_of(related: Tensor, ranks: Tensor, never: int) -> Tensor:
    """The smallest rank among the related roles: (role, other role) and (other role, column) -> (role, column)."""
    return torch.where(related[..., None], ranks, never).amin(1)
