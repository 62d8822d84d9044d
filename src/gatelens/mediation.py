"""Do learned gates and causal mediation agree? The facilitation of heads that patching marks, against the others'."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy import stats

from gatelens.anatomy import Head
from gatelens.errors import GatelensError
from gatelens.methods.head_gating import HeadRoles
from gatelens.scores import HeadScores


@dataclass(frozen=True)
class Agreement:
    """Facilitation (mean over seeds) of marked heads and of all others, and Welch's t-test that they are equal."""

    marked: tuple[Head, ...]
    facilitation: float  # mean over the marked heads
    others: float  # mean over all other heads
    t: float
    p: float  # two-sided


def compare_with_patching(roles: HeadRoles, patching: HeadScores, k: int = 10) -> Agreement:
    """The facilitation of the k heads with the largest positive patching scores, against that of the others."""
    scores = roles.facilitation.mean(0)
    if patching.scores.shape != scores.shape:
        raise GatelensError("roles and patching scores are not of the same model: their layers or heads differ.")
    if not 2 <= k <= scores.numel() - 2:
        raise GatelensError(f"mark 2 to {scores.numel() - 2} heads, not {k}.")
    marked = patching.top(k, by="signed")
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    for head in marked:
        chosen[head.layer, head.index] = True
    test = stats.ttest_ind(scores[chosen].numpy(), scores[~chosen].numpy(), equal_var=False)
    return Agreement(
        tuple(marked),
        float(scores[chosen].mean()),
        float(scores[~chosen].mean()),
        float(test.statistic),
        float(test.pvalue),
    )
