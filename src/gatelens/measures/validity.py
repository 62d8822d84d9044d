"""How far a circuit can be believed.

Three questions with every circuit: does the attribution agree with exact patching; does the circuit do the job, and
does the rest of the model fail at it; and would other prompts have given the same circuit?
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

import torch
from scipy import stats
from torch import Tensor

from gatelens.gates.scores import AttentionScores, EdgeScores, HeadScores, Ranking, Scores, rank
from gatelens.measures.curves import Curve, CurveSettings
from gatelens.measures.top_k import circuits
from gatelens.methods.patching import patch_attention, patch_edges, patch_heads
from gatelens.model import Model
from gatelens.runtime.journal import Journal
from gatelens.tasks.base import CircuitTask


@dataclass(frozen=True)
class Validity:
    """What speaks for a circuit, and what against it."""

    correlation: float | None  # rank correlation of the scores with exact patching on a sample; None: they are exact
    sampled: int  # gates in that sample
    kept: float  # gates in the circuit: the count at the threshold
    effect: float  # explained effect of the circuit
    complement: float  # explained effect of everything but the circuit
    overlap: float | None  # mean Jaccard index of the top k between task seeds; None: there is one seed


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation, -1..1."""
    return float(stats.spearmanr(a.numpy(), b.numpy()).statistic)


def jaccard(a: Tensor, b: Tensor) -> float:
    """Shared members over all members, 0..1; a and b say how often each is a member."""
    return float(torch.minimum(a, b).sum() / torch.maximum(a, b).sum().clamp(min=1e-9))


def agreement(
    model: Model, task: CircuitTask, scores: Scores, sample: int, *, memory_gb: float, journal: Journal | None = None
) -> tuple[float, int]:
    """Rank correlation of scores with exact patching of a random sample of gates on the same prompts, and its size."""
    settings = {"seed": task.seed, "memory_gb": memory_gb, "journal": journal}
    exact: Scores
    if isinstance(scores, HeadScores):
        exact = patch_heads(model, task, sample=sample, **settings)  # type: ignore[arg-type]
        chosen = torch.ones_like(scores.scores, dtype=torch.bool) if exact.measured is None else exact.measured
        ours, theirs = scores.scores[chosen], exact.scores[chosen]
    elif isinstance(scores, EdgeScores):
        exact = patch_edges(model, task, sample, **settings)  # type: ignore[arg-type]
        chosen = scores.graph.edges if exact.measured is None else exact.measured
        ours, theirs = scores.scores[chosen], exact.scores[chosen]
    else:
        exact = patch_attention(model, task, max(1, sample // len(task)), **settings)  # type: ignore[arg-type]
        pairs = list(zip(scores.scores, exact.scores, exact.edges, strict=True))
        ours = torch.cat([mine[there] for mine, _, there in pairs])
        theirs = torch.cat([other[there] for _, other, there in pairs])
    return rank_correlation(ours, theirs), len(ours)


def complement_effect(
    model: Model,
    task: CircuitTask,
    scores: Scores,
    curve: Curve,
    k: int,
    settings: CurveSettings,
    *,
    journal: Journal | None = None,
) -> float:
    """The explained effect of everything but the top k."""
    journal = journal or Journal()
    ours = circuits(model, task, scores, settings.ranking, settings.source, settings.memory_gb)
    journal.begin("all but the circuit", len(ours.batches))
    metrics = torch.empty(len(task))
    for i, bucket in enumerate(ours.batches):
        piece = journal.piece(f"complement-{i}", partial(ours.metric, i, [k], complement=True))
        metrics[bucket.which] = piece[0].float()
    none, everything = curve.none[0].mean(), curve.everything[0].mean()
    return float((metrics.mean() - none) / (everything - none))


def overlap(all_scores: Sequence[Scores], k: int, settings: CurveSettings) -> float | None:
    """Mean Jaccard index of the top k between the seeds' scores.

    Attention edges belong to prompts, which differ between seeds: there it is compared how many of a prompt's top k
    each head has, on average (the Jaccard index of multisets: sum of the smaller over sum of the larger counts).
    """
    if len(all_scores) < 2:
        return None
    tops = [_top(scores, k, settings.ranking) for scores in all_scores]
    pairs = list(combinations(tops, 2))
    return sum(jaccard(a, b) for a, b in pairs) / len(pairs)


def _top(scores: Scores, k: int, ranking: Ranking) -> Tensor:
    """How often each head or edge is among the top k: 0 or 1; for attention edges, the mean number in each head."""
    if isinstance(scores, AttentionScores):
        prompts = [one for pair in zip(scores.scores, scores.edges, strict=True) for one in zip(*pair, strict=True)]
        return torch.stack([_top_in_heads(values, edges, k, ranking) for values, edges in prompts]).mean(0)
    values = scores.scores.flatten() if isinstance(scores, HeadScores) else scores.scores[scores.graph.edges]
    return torch.zeros_like(values).index_fill_(0, rank(values, ranking)[:k], 1)


def _top_in_heads(values: Tensor, edges: Tensor, k: int, ranking: Ranking) -> Tensor:
    """How many of one prompt's top k edges are in each head: (layer * head,)."""
    layers, heads = edges.nonzero()[rank(values[edges], ranking)[:k], :2].T
    return torch.bincount(layers * values.shape[1] + heads, minlength=values[..., 0, 0].numel()).float()
