"""Explained effect against the number of gates kept, and how many are needed for most of it.

The explained effect of a circuit C is ``(m(C) - m(none)) / (m(all) - m(none))``, a ratio of means over prompts: 0 with
nothing kept and 1 with everything, by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.scores import Ranking, Scores
from gatelens.measures.top_k import SOURCES, Circuits, EdgeCircuits, Source, circuits
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.journal import Journal
from gatelens.tasks.base import CircuitTask

_RESAMPLES = 1000


@dataclass(frozen=True)
class CurveSettings:
    """How a curve is drawn."""

    ranking: Ranking = field(default="absolute", metadata={"help": "rank by the absolute or the signed score"})
    source: Source = field(default="corrupt", metadata={"help": "what is left out is put to: corrupt, mean or zero"})
    points: int = field(default=0, metadata={"help": "how many circuits to evaluate (0: a sensible grid)"})
    random_points: int = field(default=12, metadata={"help": "circuits of the random baseline (0: no baseline)"})
    memory_gb: float = field(default=2.0, metadata={"help": "memory for runs, in GB, besides the model itself"})

    def __post_init__(self) -> None:
        if self.ranking not in ("absolute", "signed"):
            raise GatelensError(f"no ranking '{self.ranking}': rankings are absolute and signed.")
        if self.source not in SOURCES:
            raise GatelensError(f"no source '{self.source}': what is left out is put to {', '.join(SOURCES)}.")
        if self.points < 0 or self.random_points < 0 or self.points == 1:
            raise GatelensError("a curve has at least 2 points, or 0 for a sensible grid.")
        if not self.memory_gb > 0:
            raise GatelensError(f"memory_gb is a number above 0, not {self.memory_gb}.")


@dataclass(frozen=True, eq=False)
class Curve:
    """The explained effect of a ranking's circuits, for one or several task seeds.

    The metrics are kept for every prompt, so that bands can be drawn anew: a bootstrap over prompts and, where there
    are several, over seeds (95 %).
    """

    level: str  # heads, edges or attention
    total: int  # gates in all
    asked: list[int]  # (point,) the k of each top-k circuit
    kept: Tensor  # (point,) gates really kept, mean over seeds
    metrics: Tensor  # (seed, point, prompt) metric of each circuit
    none: Tensor  # (seed, prompt) metric with nothing kept
    everything: Tensor  # (seed, prompt) metric with all kept
    ranking: Ranking = "absolute"
    source: Source = "corrupt"
    random: Curve | None = None  # a random ranking: the baseline

    @property
    def effect(self) -> Tensor:
        """Explained effect of each circuit, mean over seeds: (point,)."""
        return self._effects(torch.ones(1, *self.none.shape))[0]

    @property
    def low(self) -> Tensor:
        return self._band[0]

    @property
    def high(self) -> Tensor:
        return self._band[1]

    def count_at(self, threshold: float = 0.9) -> float | None:
        """The smallest number of gates whose effect is at least the threshold and stays there for the next point.

        None if the curve never gets there, which a curve that ends with everything kept does for thresholds to 1.
        """
        point = self.point_at(threshold)
        return None if point is None else float(self.kept[point])

    def point_at(self, threshold: float = 0.9) -> int | None:
        """The point of :meth:`count_at`."""
        reached = (self.effect >= threshold - 1e-6).tolist()
        points = range(len(reached))
        return next((i for i in points if reached[i] and all(reached[i : i + 2])), None)

    def _effects(self, weights: Tensor) -> Tensor:
        """Effects under weights of the prompts (draw, seed, prompt): (draw, point)."""
        weights = weights.to(self.none.dtype)
        gained = torch.einsum("wsp,skp->wsk", weights, self.metrics - self.none[:, None])
        possible = torch.einsum("wsp,sp->ws", weights, self.everything - self.none)
        seeds = (weights.sum(2) > 0).to(weights)  # a draw may leave a seed out, or take it twice
        share = gained / possible[..., None].where(possible[..., None] != 0, torch.ones_like(possible[..., None]))
        times = weights.sum(2) / weights.shape[2] * seeds
        return torch.einsum("wsk,ws->wk", share, times) / times.sum(1, keepdim=True)

    @cached_property
    def _band(self) -> tuple[Tensor, Tensor]:
        seeds, prompts = self.none.shape
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(prompts, (_RESAMPLES, seeds, prompts), generator=generator)
        weights = torch.zeros(_RESAMPLES, seeds, prompts).scatter_add_(2, drawn, torch.ones(drawn.shape))
        if seeds > 1:
            which = torch.randint(seeds, (_RESAMPLES, seeds), generator=generator)
            times = torch.zeros(_RESAMPLES, seeds).scatter_add_(1, which, torch.ones(which.shape))
            weights = weights * times[..., None]
        effects = self._effects(weights)
        return torch.quantile(effects, 0.025, dim=0), torch.quantile(effects, 0.975, dim=0)


def explained_effect(
    model: Model,
    task: CircuitTask,
    scores: Scores,
    settings: CurveSettings | None = None,
    *,
    most: int | None = None,
    journal: Journal | None = None,
) -> Curve:
    """The curve of these scores: keep the top k, put everything else to its corrupt value, for a grid of k.

    most: where the grid ends if that is above the number of gates; curves that are to be pooled need one grid.
    Cost: about 1 forward per circuit for heads and attention edges, 1.5 to 2 for edges between components.
    """
    settings = settings or CurveSettings()
    journal = journal or Journal()
    ours = circuits(model, task, scores, settings.ranking, settings.source, settings.memory_gb)
    total = max(ours.total, most or 0)
    ks = grid(ours.level, total, settings.points)
    curve = _curve(ours, ks, journal, "curve", settings)
    _refuse_flat(curve, model, task)
    if settings.random_points:
        coarse = grid(ours.level, total, max(2, settings.random_points))
        curve = replace(curve, random=_curve(ours.shuffled(task.seed), coarse, journal, "random", settings))
    return curve


def edges_effect(
    model: Model, task: CircuitTask, kept: Tensor, source: Source = "corrupt", *, memory_gb: float = 2.0
) -> tuple[float, float]:
    """Explained effect of a given set of edges, bool (source, destination), and of all other edges.

    For circuits from elsewhere (:func:`gatelens.measures.exchange.read_graph`). Cost: four edge circuits.
    """
    graph = Graph.of(model.anatomy)
    order = graph.edges.flatten().nonzero()[:, 0]
    chosen = (kept & graph.edges).flatten()[order]
    ours = EdgeCircuits(model, task, torch.cat([order[chosen], order[~chosen]]), source, memory_gb)
    metrics = torch.empty(4, len(task))
    for i, bucket in enumerate(ours.batches):
        inside = ours.metric(i, [0, int(chosen.sum()), ours.total])
        metrics[:, bucket.which] = torch.cat([inside, ours.metric(i, [int(chosen.sum())], complement=True)]).float()
    none, circuit, everything, rest = metrics.mean(1).tolist()
    return (circuit - none) / (everything - none), (rest - none) / (everything - none)


def multiplier(dense: Curve, sparse: Curve, at: float = 0.9) -> float:
    """How many times fewer gates the sparse model needs: dense count / sparse count, in this order; below 1, more."""
    if dense.level != sparse.level:
        raise GatelensError(f"a curve of {dense.level} and one of {sparse.level} have no multiplier.")
    counts = dense.count_at(at), sparse.count_at(at)
    if counts[0] is None or counts[1] is None:
        raise GatelensError(
            f"one of the curves does not reach {at}: ask for a lower threshold or evaluate more points."
        )
    return counts[0] / max(counts[1], 1e-9) if counts[1] else float("inf")


def pool(curves: Sequence[Curve]) -> Curve:
    """The curves of several task seeds as one, with a band over seeds and prompts."""
    first = curves[0]
    if any(curve.asked != first.asked or curve.none.shape != first.none.shape for curve in curves):
        raise GatelensError("only curves over the same grid and as many prompts can be pooled.")
    randoms = [curve.random for curve in curves if curve.random is not None]
    return replace(
        first,
        total=max(curve.total for curve in curves),
        kept=torch.stack([curve.kept for curve in curves]).mean(0),
        metrics=torch.cat([curve.metrics for curve in curves]),
        none=torch.cat([curve.none for curve in curves]),
        everything=torch.cat([curve.everything for curve in curves]),
        random=pool(randoms) if randoms else None,
    )


def grid(level: str, total: int, points: int = 0) -> list[int]:
    """The numbers of gates to keep, from 0 to all.

    Heads: every number up to 150, then every tenth; or evenly spaced. Edges: spaced by their logarithm, 32 by default.
    """
    if level == "heads":
        if not points:
            return sorted({*range(min(total, 150) + 1), *range(150, total, 10), total})
        return sorted({round(i * total / (points - 1)) for i in range(points)})
    spaced = torch.logspace(0, torch.log10(torch.tensor(float(total))).item(), (points or 32) - 1)
    return sorted({0, *(min(total, round(k)) for k in spaced.tolist()), total})


def _curve(ours: Circuits, ks: list[int], journal: Journal, name: str, settings: CurveSettings) -> Curve:
    rows = 8  # circuits in one piece of work
    cuts = [ks[start : start + rows] for start in range(0, len(ks), rows)]
    journal.begin(f"{name}: {ours.level} kept", len(cuts) * len(ours.batches))
    metrics = torch.empty(len(ks), len(ours.task))
    for i, bucket in enumerate(ours.batches):
        pieces = [journal.piece(f"{name}-{i}-{n}", partial(ours.metric, i, cut)) for n, cut in enumerate(cuts)]
        metrics[:, bucket.which] = torch.cat(pieces).float()
    kept = torch.tensor(ours.counts(ks))
    # The grid begins with nothing and ends with everything.
    return Curve(
        ours.level,
        ours.total,
        ks,
        kept,
        metrics[None],
        metrics[None, 0],
        metrics[None, -1],
        settings.ranking,
        settings.source,
    )


def _refuse_flat(curve: Curve, model: Model, task: CircuitTask) -> None:
    possible = (curve.everything - curve.none).mean().item()
    if abs(possible) < 1e-6:
        raise GatelensError(
            f"leaving out all {curve.level} of {model.name} does not change the metric of {task.name} "
            f"(by {possible:.1g}): there is no effect to explain. `gatelens tasks {task.name} --model {model.name}` "
            "shows whether the model has this behaviour at all."
        )
