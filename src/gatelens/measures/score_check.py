"""Check scores against exact patching, on a stratified sample of gates.

A random sample of thousands of gates holds hardly one that matters, so the sample has three strata of about the same
size: the *top* of the ranking, the *middle* (ranks that are evenly spaced by their logarithm below the top), and
*random* gates of the rest. A rank correlation of fewer than 16 gates means nothing and is never computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Int, Shaped
from pydantic import Field, model_validator
from scipy import stats
from torch import Tensor

from gatelens.gates.scores import Ranking, Scores
from gatelens.measures.counts import Interval
from gatelens.methods.patching import patch
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.settings import Settings
from gatelens.tasks.base import CircuitTask

LEAST_GATES = 16
"""A rank correlation needs this many gates."""
STRATA = ("top", "middle", "random")
_RESAMPLES = 1000


class Agreement(Settings):
    """The rank correlation of scores with exact patching, with the 95 % interval of a bootstrap over gates.

    ``agreement.shown`` is what all tables print: ``0.77 (0.61 to 0.88; 64 gates, 8 prompts)``.
    """

    correlation: float | None = Field(
        default=None,
        description="rank correlation of the scores with exact patching on a sample of gates, in -1..1; None: not "
        "checked, fewer than 16 gates, or all scores equal",
    )
    correlation_low: float | None = Field(default=None, description="lower end of its 95 % interval; None: not known")
    correlation_high: float | None = Field(default=None, description="upper end of its 95 % interval; None: not known")
    sampled: int = Field(default=0, description="gates in that sample")
    checked_prompts: int | None = Field(default=None, description="prompts that were patched; None: not known")

    @model_validator(mode="before")
    @classmethod
    def _drop_small_samples(cls, values: Any) -> Any:
        """Earlier versions saved correlations of a few gates."""
        if isinstance(values, Mapping) and (values.get("sampled") or 0) < LEAST_GATES:
            return {**values, "correlation": None, "correlation_low": None, "correlation_high": None}
        return values

    @property
    def shown(self) -> str:
        """The correlation as it is printed, with its interval and the size of the sample."""
        if not self.sampled:
            return "-"
        if self.sampled < LEAST_GATES:
            return f"- ({self.sampled} gates; a correlation needs {LEAST_GATES})"
        sizes = f"{self.sampled:,} gates" + (
            "" if self.checked_prompts is None else f", {self.checked_prompts} prompts"
        )
        if self.correlation is None:
            return f"- (all scores are equal; {sizes})"
        has_interval = self.correlation_low is not None and self.correlation_high is not None
        interval = f"{self.correlation_low:.2f} to {self.correlation_high:.2f}" if has_interval else "no interval"
        return f"{self.correlation:.2f} ({interval}; {sizes})"


class Stratum(Agreement):
    """The agreement on one stratum of the sample."""

    stratum: str = Field(description="top, middle or random")


class ScoreCheck(NamedTuple):
    """What exact patching of a sample says about scores."""

    overall: Agreement
    strata: tuple[Stratum, ...]


def rank_correlation(a: Shaped[Tensor, " gate"], b: Shaped[Tensor, " gate"]) -> float:
    """Spearman's rank correlation, in -1..1; nan if a or b is constant."""
    if len(a) < 2 or len(a.unique()) == 1 or len(b.unique()) == 1:
        return float("nan")
    return float(stats.spearmanr(a.numpy(), b.numpy()).statistic)


def correlation_interval(
    a: Shaped[Tensor, " gate"], b: Shaped[Tensor, " gate"], strata: Int[Tensor, " gate"]
) -> Interval:
    """The 95 % bootstrap interval of `rank_correlation`: gates are drawn again inside their strata, 1,000 times.

    Draws in which all numbers of one side are equal have no correlation and are left out. Both ends are None if no draw
    has one.

    Arguments:
        strata: the number of each gate's stratum.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for stratum in strata.unique():
        members = (strata == stratum).nonzero()[:, 0]
        drawn.append(members[torch.randint(len(members), (_RESAMPLES, len(members)), generator=generator)])
    places = torch.cat(drawn, 1)
    x, y = (stats.rankdata(values[places].numpy(), axis=1) for values in (a, b))
    x, y = (ranks - ranks.mean(1, keepdims=True) for ranks in (x, y))
    product, scale = (x * y).sum(1), np.sqrt((x**2).sum(1) * (y**2).sum(1))
    draws = torch.from_numpy(product[scale > 0] / scale[scale > 0]).clamp(-1, 1)
    return Interval.of(draws) if len(draws) else Interval(None, None)


def stratified(order: Int[Tensor, " gate"], n: int, seed: int) -> dict[str, Int[Tensor, " _gate"]]:
    """A sample of n gates, by stratum: the first third, ranks spaced by their logarithm, and random ones of the rest.

    Arguments:
        order: the positions of all gates from best to worst.
        n: the size of the sample; all gates if there are fewer.
        seed: decides the random stratum.
    """
    total = len(order)
    n = min(n, total)
    n_top, n_middle = -(-n // 3), -(-(n - -(-n // 3)) // 2)
    ranks: list[int] = []
    for i in range(n_middle):
        spaced = round(n_top * (total / n_top) ** ((i + 0.5) / n_middle))
        # No rank twice, and enough ranks for those that follow.
        ranks.append(min(max(spaced, n_top if not ranks else ranks[-1] + 1), total - n_middle + i))
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[:n_top] = True
    chosen[ranks] = True
    rest = (~chosen).nonzero()[:, 0]
    drawn = rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[: n - n_top - n_middle]]
    return dict(zip(STRATA, (order[:n_top], order[ranks], order[drawn.sort().values]), strict=True))


def check_scores(
    model: Model,
    task: CircuitTask,
    scores: Scores,
    sample: int,
    ranking: Ranking = "absolute",
    *,
    context: Context | None = None,
) -> ScoreCheck:
    """The rank correlation of scores with exact patching of a stratified sample of gates, on the same prompts.

    Scores are compared with their sign, whatever they are ranked by.

    Arguments:
        task: the prompts that were scored. All of them are patched.
        sample: the number of gates. If prompts have their own gates, as many in all prompts together, and the same
            number in each.
        ranking: what the strata are made by.

    Returns:
        The agreement on the whole sample and on each stratum. Cost: 2 forwards, and ``level.cost.patch`` forwards for
        each gate and prompt that has it.
    """
    gate_sets = scores.gate_sets()
    per_set = -(-sample // len(gate_sets))
    samples = [stratified(order, per_set, task.seed + i) for i, order in enumerate(scores.orders(ranking))]
    chosen = [torch.cat(list(strata.values())) for strata in samples]
    exact = patch(scores.level, model, task, gates=chosen, context=context)
    ours, patched = (
        torch.cat([gate_set.scores.flatten()[places] for gate_set, places in zip(sets, chosen, strict=True)])
        for sets in (gate_sets, exact.gate_sets())
    )
    strata = torch.tensor([i for one in samples for i, places in enumerate(one.values()) for _ in places])
    by_stratum = [(name, strata == i) for i, name in enumerate(STRATA)]
    return ScoreCheck(
        _agreement(ours, patched, strata, len(task)),
        tuple(
            Stratum(stratum=name, **dict(_agreement(ours[of], patched[of], strata[of], len(task))))
            for name, of in by_stratum
        ),
    )


def _agreement(ours: Tensor, patched: Tensor, strata: Tensor, prompts: int) -> Agreement:
    """The agreement of two scores of the same gates."""
    correlation = rank_correlation(ours, patched)
    if len(ours) < LEAST_GATES or correlation != correlation:
        return Agreement(sampled=len(ours), checked_prompts=prompts)
    low, high = correlation_interval(ours, patched, strata)
    return Agreement(
        correlation=correlation,
        correlation_low=low,
        correlation_high=high,
        sampled=len(ours),
        checked_prompts=prompts,
    )
