"""Curves of explained effect against the number of gates kept, and how many gates are needed for most of it.

A curve holds the metric of every circuit on every prompt. Everything else follows from these numbers: the effect, its
band, the count at a threshold with its interval, and the multiplier between two curves. `gatelens.measures.effect`
measures curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import level_named
from gatelens.gates.level import Source
from gatelens.gates.scores import Ranking
from gatelens.gates.selection import TOP
from gatelens.measures.areas import Area, from_one, under_effect
from gatelens.measures.counts import Count, Interval, Multiplier, Sample, joint_interval
from gatelens.runtime.shown import Shown

_RESAMPLES = 1000


@dataclass(frozen=True, eq=False, repr=False)
class Curve(Shown):
    """The explained effect of a ranking's circuits, for one or several task seeds.

    The explained effect of a circuit C is ``(m(C) - m(none)) / (m(all) - m(none))``, a ratio of means over prompts: 0
    with nothing kept and 1 with everything, by construction. Bands and intervals are 95 % bootstrap intervals over
    prompts and, if there are several, over seeds. The ranking is held fixed when prompts are drawn again.

    Example:
        curve = gatelens.explained_effect(model, task, scores)
        curve.kept, curve.effect, curve.low, curve.high
        curve.plot()
    """

    level: str  # the name of the level
    total: int  # number of gates
    asked: list[int]  # (point,) the k of each top-k circuit
    kept: Float[Tensor, " point"]  # gates in each circuit after pruning, mean over seeds
    metrics: Float[Tensor, "seed point prompt"]  # the metric of each circuit
    none: Float[Tensor, "seed prompt"]  # metric with nothing kept
    everything: Float[Tensor, "seed prompt"]  # metric with everything kept
    ranking: Ranking = "absolute"  # how gates were ranked
    source: Source = "corrupt"  # what closed gates read
    random: Curve | None = None  # a random ranking: the baseline
    selection: str = TOP  # how circuits take gates
    fingerprints: tuple[str, ...] = ()  # of the prompts of each seed; empty: not known
    mib: Curve | None = None  # the circuits on MIB's grid, by a ranking of their own, for CPR and CMD
    ranked_on: int = 0  # other prompts that gates were ranked on, for each seed; 0: the prompts of the curve

    drawn_by = "gatelens.report.plots:plot_curve"

    def records(self) -> list[dict[str, Any]]:
        columns = {"kept": self.kept, "effect": self.effect, "low": self.low, "high": self.high}
        points = zip(*(values.tolist() for values in columns.values()), strict=True)
        return [dict(zip(columns, point, strict=True)) for point in points]

    def headline(self) -> str:
        noun = level_named(self.level).noun
        return f"explained effect of {noun} kept, {self.sample}"

    @property
    def sample(self) -> Sample:
        """The prompts that the curve was measured on."""
        seeds, prompts = self.none.shape
        return Sample(prompts, seeds, self.ranked_on)

    @property
    def effect(self) -> Tensor:
        """Explained effect of each circuit, mean over seeds: (point,)."""
        return self._effects(torch.ones(1, *self.none.shape))[0]

    @property
    def low(self) -> Tensor:
        """The lower end of the band: (point,)."""
        return self._band[0]

    @property
    def high(self) -> Tensor:
        """The upper end of the band: (point,)."""
        return self._band[1]

    def count_at(self, threshold: float = 0.9) -> int | None:
        """The smallest number of gates whose effect is at least the threshold, and stays so at the next point.

        None if the curve does not reach it. A curve that ends with everything kept reaches every threshold up to 1.
        To print a count, use `counted`, which has the interval and the number of prompts.
        """
        point = self.point_at(threshold)
        return None if point is None else round(float(self.kept[point]))

    def count_interval(self, threshold: float = 0.9) -> Interval:
        """The 95 % bootstrap interval of `count_at`.

        Prompts (and seeds) are drawn again 1,000 times, and the gates are counted in each draw. An end is None if the
        draws at that end do not reach the threshold: the interval is then open. A draw whose denominator has another
        sign than that of all prompts counts as not reached.
        """
        return Interval.of(self.drawn_counts(_draws(*self.none.shape), threshold))

    def counted(self, threshold: float = 0.9, *, coarse: bool = False) -> Count:
        """`count_at` with its interval and the number of prompts, for printing.

        Arguments:
            coarse: the grid was not refined around this threshold. The count may then be anywhere above the point
                before it, and the interval contains all of these numbers.
        """
        low, high = self.count_interval(threshold)
        if coarse:
            low = Interval.of(self.drawn_counts(_draws(*self.none.shape), threshold, least=True)).low
        return Count(self.count_at(threshold), Interval(low, high), self.sample)

    @property
    def cpr(self) -> Area | None:
        """MIB's CPR: the area under the effect over the share of gates kept; None if its circuits were not measured."""
        return self._area(under_effect)

    @property
    def cmd(self) -> Area | None:
        """MIB's CMD: the area between the effect and 1; None if its circuits were not measured."""
        return self._area(from_one)

    def _area(self, area: Callable[[Tensor], Tensor]) -> Area | None:
        if self.mib is None:
            return None
        drawn = area(self.mib._effects(_draws(*self.none.shape)))
        return Area(area(self.mib.effect[None]).item(), Interval.of(drawn), self.sample)

    def point_at(self, threshold: float = 0.9) -> int | None:
        """The index of the point that `count_at` counts; None if the curve does not reach the threshold."""
        point, reached = _first_that_stays(self.effect[None], threshold)
        return int(point[0]) if reached[0] else None

    def circuit_point(self, threshold: float = 0.9) -> int:
        """The index of the point that is *the* circuit: `point_at`, or the last one if the threshold is not reached."""
        point = self.point_at(threshold)
        return len(self.asked) - 1 if point is None else point

    def drawn_counts(
        self, weights: Float[Tensor, "draw seed prompt"], threshold: float, *, least: bool = False
    ) -> Float[Tensor, " draw"]:
        """The count of each draw of prompts; infinite if the draw does not reach the threshold.

        Arguments:
            weights: how often each draw has each prompt.
            least: return the smallest count that the grid allows: one gate more than at the point before.
        """
        points, reached = _first_that_stays(self._effects(weights), threshold)
        possible = torch.einsum("wsp,sp->ws", weights.to(self.none), self.everything - self.none)
        usual = (self.everything - self.none).sum(1).sign()
        reached &= ((possible * usual > 0) | (weights.sum(2) == 0)).all(1)
        counts = self.kept[points]
        if least:
            counts = torch.minimum(counts, self.kept[(points - 1).clamp(min=0)] + 1)
        return counts.where(reached, math.inf)

    def of_seed(self, seed: int) -> Curve:
        """The curve of one task seed, by its place in the order of seeds."""
        part = slice(seed, seed + 1)
        return replace(
            self,
            metrics=self.metrics[part],
            none=self.none[part],
            everything=self.everything[part],
            random=None if self.random is None else self.random.of_seed(seed),
            mib=None if self.mib is None else self.mib.of_seed(seed),
            fingerprints=self.fingerprints[part],
        )

    def with_points(self, other: Curve) -> Curve:
        """The curve with the points of another one of the same circuits, in the order of k."""
        order = torch.tensor([*self.asked, *other.asked]).argsort(stable=True)
        asked = sorted([*self.asked, *other.asked])
        metrics = torch.cat([self.metrics, other.metrics], 1)[:, order]
        return replace(self, asked=asked, kept=torch.cat([self.kept, other.kept])[order], metrics=metrics)

    def _effects(self, weights: Tensor) -> Tensor:
        """The explained effects with weighted prompts: weights (draw, seed, prompt) -> effects (draw, point)."""
        weights = weights.to(self.none.dtype)
        gained = torch.einsum("wsp,skp->wsk", weights, self.metrics - self.none[:, None])
        possible = torch.einsum("wsp,sp->ws", weights, self.everything - self.none)
        seeds = (weights.sum(2) > 0).to(weights)  # a draw may leave a seed out, or take it twice
        share = gained / possible[..., None].where(possible[..., None] != 0, torch.ones_like(possible[..., None]))
        times = weights.sum(2) / weights.shape[2] * seeds
        return torch.einsum("wsk,ws->wk", share, times) / times.sum(1, keepdim=True)

    @cached_property
    def _band(self) -> tuple[Tensor, Tensor]:
        effects = self._effects(_draws(*self.none.shape))
        return torch.quantile(effects, 0.025, dim=0), torch.quantile(effects, 0.975, dim=0)


def multiplier(dense: Curve, sparse: Curve, at: float = 0.9, *, coarse: bool = False) -> Multiplier:
    """How many times fewer gates the sparse model needs: dense count / sparse count. Below 1, it needs more.

    The interval is that of a paired bootstrap: the same prompts are drawn for both models, so that prompts which are
    hard for both do not widen it. If the curves have other prompts, or do not know their prompts, each curve's prompts
    are drawn on their own; the interval is then wider, and ``paired`` is False.

    Arguments:
        dense, sparse: curves of the same level.
        at: the explained effect at which gates are counted.
        coarse: the grids were not refined around this threshold. A count is then known only to lie between two points,
            and the interval contains all ratios that this leaves possible.

    Example:
        >>> print(gatelens.multiplier(dense_curve, sparse_curve, at=0.5))
        1.40x (1.12 to 1.95; 64 prompts)
    """
    if dense.level != sparse.level:
        raise GatelensError(
            f"a curve of {dense.level} and a curve of {sparse.level} have no multiplier: give curves of the same level."
        )
    counts = dense.count_at(at), sparse.count_at(at)
    if counts[0] is None or counts[1] is None:
        raise GatelensError(
            f"one of the curves does not reach {at}: ask for a lower threshold or evaluate more points."
        )
    paired = bool(dense.fingerprints) and dense.fingerprints == sparse.fingerprints
    draws = _draws(*dense.none.shape), _draws(*sparse.none.shape, seed=0 if paired else 1)
    most = dense.drawn_counts(draws[0], at), sparse.drawn_counts(draws[1], at)
    least = dense.drawn_counts(draws[0], at, least=coarse), sparse.drawn_counts(draws[1], at, least=coarse)
    return Multiplier(
        counts[0] / counts[1] if counts[1] else math.inf,
        Interval(joint_interval(least[0], most[1]).low, joint_interval(most[0], least[1]).high),
        (dense.sample, sparse.sample),
        paired,
    )


def pool(curves: Sequence[Curve]) -> Curve:
    """Join the curves of several task seeds into one, with a band over seeds and prompts.

    The curves need the same grid, so they cannot be refined around their own counts: measure them with ``refine=0``, or
    give all tasks to `explained_effect` at once.

    Arguments:
        curves: one curve for each task seed, of the same level.

    Example:
        tasks = [gatelens.task("ioi", model, n=16, seed=seed) for seed in (0, 1)]
        curve = gatelens.pool([gatelens.explained_effect(model, one, scores) for one in tasks])
    """
    first = curves[0]
    if any(curve.asked != first.asked or curve.none.shape[1] != first.none.shape[1] for curve in curves):
        raise GatelensError("only curves with the same grid and the same number of prompts can be pooled.")
    randoms = [curve.random for curve in curves if curve.random is not None]
    mibs = [curve.mib for curve in curves if curve.mib is not None]
    known = all(curve.fingerprints for curve in curves)
    return replace(
        first,
        total=max(curve.total for curve in curves),
        kept=torch.stack([curve.kept for curve in curves]).mean(0),
        metrics=torch.cat([curve.metrics for curve in curves]),
        none=torch.cat([curve.none for curve in curves]),
        everything=torch.cat([curve.everything for curve in curves]),
        random=pool(randoms) if randoms else None,
        mib=pool(mibs) if mibs else None,
        fingerprints=tuple(one for curve in curves for one in curve.fingerprints) if known else (),
    )


@lru_cache(maxsize=8)
def _draws(seeds: int, prompts: int, seed: int = 0) -> Float[Tensor, "draw seed prompt"]:
    """How often each draw of a bootstrap has each prompt. The same arguments give the same draws.

    Arguments:
        seed: decides the draws. Two curves with the same prompts use the same seed, so that they are paired.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(prompts, (_RESAMPLES, seeds, prompts), generator=generator)
    weights = torch.zeros(_RESAMPLES, seeds, prompts).scatter_add_(2, drawn, torch.ones(drawn.shape))
    if seeds > 1:
        drawn_seeds = torch.randint(seeds, (_RESAMPLES, seeds), generator=generator)
        times = torch.zeros(_RESAMPLES, seeds).scatter_add_(1, drawn_seeds, torch.ones(drawn_seeds.shape))
        weights = weights * times[..., None]
    return weights


def _first_that_stays(effects: Float[Tensor, "draw point"], threshold: float) -> tuple[Tensor, Tensor]:
    """The first point of each curve that reaches the threshold and stays there at the next point, and if there is one.

    Returns:
        (draw,) the index of the point, and (draw,) whether there is one.
    """
    reached = effects >= threshold - 1e-6
    stays = reached.clone()
    stays[:, :-1] &= reached[:, 1:]
    return stays.int().argmax(1), stays.any(1)
