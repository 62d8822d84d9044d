"""When each edge of a ranking becomes part of a circuit: the page moves a slider over the number of edges."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gatelens.model.graph import Graph
from gatelens.report._components import Edge


def joins(graph: Graph, ranked: Sequence[Edge]) -> list[int]:
    """For each edge, the smallest k such that it is on a path from the embedding to the logits in the top k edges.

    A path exists as soon as its lowest-ranked edge is included, so a component joins with the path to it whose
    lowest-ranked edge has the best rank.

    Arguments:
        ranked: the first edges of a ranking, best first.

    Returns:
        One number per edge, in the order of the ranking; 0 if that takes more edges than are given.
    """
    never = len(ranked) + 1
    ranks = torch.full((graph.n_sources, graph.n_destinations), never)
    sources, destinations = torch.tensor(list(ranked)).T
    ranks[sources, destinations] = torch.arange(1, never)
    # 1. Forwards: when the embedding reaches each source.
    reached = torch.full((graph.n_sources,), never)
    reached[0] = 0
    for layer in range(graph.n_layers):
        inputs = graph.attention_inputs(layer)
        reached[graph.heads(layer)] = _by_head(graph, torch.maximum(ranks[:, inputs], reached[:, None]).amin(0))
        reached[graph.mlp(layer)] = torch.maximum(ranks[:, graph.mlp_input(layer)], reached).min()
    # 2. Backwards: when each destination reaches the logits.
    useful = torch.full((graph.n_destinations,), never)
    useful[graph.logits] = 0
    for layer in reversed(range(graph.n_layers)):
        useful[graph.mlp_input(layer)] = torch.maximum(ranks[graph.mlp(layer)], useful).min()
        heads = torch.maximum(ranks[graph.heads(layer)], useful).amin(1)
        useful[graph.attention_inputs(layer)] = _by_input(graph, heads)
    # 3. An edge joins when it is included, its source is reached and its destination is useful.
    joined = torch.stack([ranks[sources, destinations], reached[sources], useful[destinations]]).amax(0)
    return torch.where(joined < never, joined, 0).tolist()


def _by_head(graph: Graph, inputs: Tensor) -> Tensor:
    """When the first of a head's three inputs is reached. Coupled heads count as one."""
    if graph.coupled:
        return inputs.min()
    q, k, v = inputs.split([graph.n_heads, graph.n_kv_heads, graph.n_kv_heads])
    return torch.minimum(q, torch.minimum(k, v).repeat_interleave(graph.n_heads // graph.n_kv_heads))


def _by_input(graph: Graph, heads: Tensor) -> Tensor:
    """When the first of the heads behind an input becomes useful."""
    if graph.coupled:
        return heads.min()
    shared = heads.unflatten(0, (graph.n_kv_heads, -1)).amin(1)
    return torch.cat([heads, shared, shared])
