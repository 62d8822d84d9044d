"""The best attention edges of each prompt: what a report needs of attention scores, in a small part of their size.

The scores of all attention edges take 4 bytes for each layer, head, query and key of every prompt: 120 MB for 32
prompts of 60 tokens in SmolLM2. The best 2,000 edges of each prompt take 0.5 MB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from gatelens.gates.attention import AttentionEdgeScores, AttentionScores
from gatelens.gates.scores import GateSet

BEST = 2000
"""How many edges of each prompt are stored."""
_HEAD_SUMS = "head_sums"


@dataclass(frozen=True, eq=False, repr=False)
class BestAttentionScores(AttentionEdgeScores):
    """The edges with the largest absolute scores in each prompt, and the sum over all edges of each head.

    They are a sample: circuits cannot be ranked by them, because the other edges have no score.
    """

    positions: Sequence[Int[Tensor, "_prompt _best"]]  # in the flattened (layer, head, query, key); -1: no edge
    scores: Sequence[Shaped[Tensor, "_prompt _best"]]  # of these edges
    shapes: Sequence[tuple[int, ...]]  # (layer, head, query, key) of the prompts of each bucket
    head_sums: Shaped[Tensor, "layer head"]  # of the scores of all edges, mean over prompts
    method: str

    @classmethod
    def of(cls, scores: AttentionScores, most: int = BEST) -> BestAttentionScores:
        """The best of these edges, best first."""
        positions, best = [], []
        for all_scores, edges in zip(scores.scores, scores.edges, strict=True):
            chosen = [_best(*prompt, most) for prompt in zip(all_scores, edges, strict=True)]  # one prompt at a time
            positions.append(torch.stack([order for order, _ in chosen]))
            best.append(torch.stack([own for _, own in chosen]))
        shapes = [tuple(all_scores.shape[1:]) for all_scores in scores.scores]
        return cls(positions, best, shapes, scores.by_head(), scores.method)

    @staticmethod
    def are_in(tensors: Mapping[str, Tensor]) -> bool:
        """Whether these tensors were saved by this class."""
        return _HEAD_SUMS in tensors

    @classmethod
    def read(cls, tensors: Mapping[str, Tensor], method: str) -> BestAttentionScores:
        """The scores whose `tensors` were saved."""
        n_buckets = sum(name.endswith(".positions") for name in tensors)
        positions, scores, shapes = (
            [tensors[f"bucket-{i}.{name}"] for i in range(n_buckets)] for name in ("positions", "scores", "shape")
        )
        return cls(positions, scores, [tuple(shape.tolist()) for shape in shapes], tensors[_HEAD_SUMS], method)

    def tensors(self) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {_HEAD_SUMS: self.head_sums}
        buckets = zip(self.positions, self.scores, map(torch.tensor, self.shapes), strict=True)
        for i, bucket in enumerate(buckets):
            names = (f"bucket-{i}.{name}" for name in ("positions", "scores", "shape"))
            tensors |= zip(names, bucket, strict=True)
        return tensors

    @property
    def is_sample(self) -> bool:
        return True

    def gate_sets(self) -> list[GateSet]:
        buckets = zip(self.positions, self.scores, self.shapes, strict=True)
        return [
            _gate_set(*prompt, shape)
            for positions, scores, shape in buckets
            for prompt in zip(positions, scores, strict=True)
        ]

    def by_head(self) -> Shaped[Tensor, "layer head"]:
        """The sum of the scores of all edges of a head, mean over prompts."""
        return self.head_sums


def _best(
    scores: Shaped[Tensor, "layer head query key"], edges: Bool[Tensor, "layer head query key"], most: int
) -> tuple[Int[Tensor, " _best"], Shaped[Tensor, " _best"]]:
    """The positions of the best edges of one prompt, best first, and their scores. The position -1 is no edge."""
    flat, exists = scores.flatten(), edges.flatten()
    order = flat.abs().where(exists, -1).sort(descending=True, stable=True).indices[:most]
    is_edge = exists[order]
    return order.where(is_edge, -1).int(), flat[order].where(is_edge, 0)


def _gate_set(positions: Int[Tensor, " best"], scores: Shaped[Tensor, " best"], shape: tuple[int, ...]) -> GateSet:
    """The edges of one prompt at their places. There is no gate at all other places."""
    is_edge = positions >= 0
    places = positions[is_edge].long()
    all_scores = torch.zeros(torch.Size(shape).numel(), dtype=scores.dtype)
    exists = torch.zeros(len(all_scores), dtype=torch.bool)
    all_scores[places], exists[places] = scores[is_edge], True
    return GateSet(*(part.unflatten(0, shape) for part in (all_scores, exists, all_scores.abs())))
