"""How far a circuit can be trusted.

Three questions are asked of every circuit: Do the scores agree with exact patching (`score_check`)? Does the circuit do
the task, and does the rest of the model fail at it? Would other prompts have given the same circuit?
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations

import torch
from jaxtyping import Shaped
from pydantic import Field
from torch import Tensor

from gatelens.gates.scores import Ranking, Scores
from gatelens.gates.selection import TOP, selected
from gatelens.measures.curves import Curve
from gatelens.measures.score_check import Agreement, Stratum
from gatelens.measures.top_k import Circuits
from gatelens.runtime.context import Context


class Validity(Agreement):
    """How far a circuit can be trusted: agreement with patching, effect of the rest, overlap between task seeds.

    Example:
        validity = gatelens.load_circuit("runs/ioi").validity
        validity.effect, validity.complement, validity.shown
    """

    kept: float = Field(description="gates in the circuit: the count at the threshold")
    effect: float = Field(description="explained effect of the circuit")
    complement: float = Field(description="explained effect of everything but the circuit")
    overlap: float | None = Field(description="mean Jaccard index of the top k between task seeds; None: one seed")
    strata: tuple[Stratum, ...] = Field(
        default=(), description="the correlation on the top, the middle and the random gates of the sample"
    )


def jaccard(a: Shaped[Tensor, " member"], b: Shaped[Tensor, " member"]) -> float:
    """The Jaccard index of two multisets, in 0..1: shared members over all members.

    Arguments:
        a, b: how often each member is in each of the multisets.
    """
    return float(torch.minimum(a, b).sum() / torch.maximum(a, b).sum().clamp(min=1e-9))


def complement_effect(circuits: Circuits, curve: Curve, k: int, *, context: Context | None = None) -> float:
    """The explained effect of everything but the top k, in units of a curve of the same circuits."""
    complement = partial(circuits.metric, ks=[k], complement=True)
    [metrics] = circuits.measure("all but the circuit", [(f"complement-{k}", complement)], context)
    none, everything = curve.none[0].mean(), curve.everything[0].mean()
    return float((metrics.mean() - none) / (everything - none))


def overlap(all_scores: Sequence[Scores], k: int, ranking: Ranking, selection: str = TOP) -> float | None:
    """Mean Jaccard index of the top k between the scores of several seeds; None if there is only one seed.

    Attention edges belong to prompts, which differ between seeds: there the number of top-k edges of each head is
    compared (the Jaccard index of multisets: the sum of the smaller counts over the sum of the larger ones).
    """
    if len(all_scores) < 2:
        return None
    members = [scores.membership(k, selected(scores, ranking, selection)) for scores in all_scores]
    pairs = list(combinations(members, 2))
    return sum(jaccard(a, b) for a, b in pairs) / len(pairs)
