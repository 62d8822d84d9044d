"""The penalty on open edges, one number for each sequence. Gates are counted by their expectation, with gradient.

    share     expected share of open edges of all heads together, as in the paper
    total     logarithm of this share
    per-head  mean over heads of log(expected keys per query of the head + EPSILON)
    per-query mean over heads and queries of log(expected keys of the query + EPSILON)

The logarithms keep the gradient of the gates as large when few are open as when all are. In the total, a head counts
by its number of open edges, so that the heads with the most are closed first, and every other one stays a little open.
Per head, closing the last key of a head that is hardly used is worth as much as halving the keys of a busy one.
Therefore heads become idle on sequences that do not need them. Per query, the same holds for each query of each head.
"""

from __future__ import annotations

from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from gatelens.sparse.recording import OpenRecord

Penalty = Literal["per-head", "per-query", "total", "share"]
EPSILON = 0.05  # keys per query below which a head, or a query, counts as idle: closing it further is worth little
LEAST_OPEN = 1e-12  # the logarithm of a smaller expected share is not differentiated, as that of 0 has no gradient


def penalty(record: OpenRecord, kind: Penalty, total_share: float = 0.0) -> Float[Tensor, " sequence"]:
    """The penalty of each sequence of the last forward pass, with gradient.

    Arguments:
        total_share: how much of the total is mixed into the penalty per head or per query, 0..1.
    """
    share = share_of_all_pairs(record.expected, record.pairs)
    if kind == "share":
        return share
    total = share.clamp(min=LEAST_OPEN).log()
    if kind == "total":
        return total
    keys = record.expected_keys  # (layer, sequence, head, query)
    of_each = keys.mean(-1, keepdim=True) if kind == "per-head" else keys
    return (1 - total_share) * (of_each + EPSILON).log().mean((0, 2, 3)) + total_share * total


def share_of_all_pairs(
    shares: Float[Tensor, "layer sequence head"], pairs: Int[Tensor, "layer sequence head"]
) -> Float[Tensor, " sequence"]:
    """The share of all visible pairs of a sequence, from the shares of its heads."""
    return (shares * pairs).sum((0, 2)) / pairs.sum((0, 2))
