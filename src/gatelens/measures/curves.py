"""Explained effect against the number of gates kept, and how many are needed for most of it.

The explained effect of a circuit C is ``(m(C) - m(none)) / (m(all) - m(none))``, a ratio of means over prompts: 0 with
nothing kept and 1 with everything, by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import EDGES
from gatelens.gates.level import Ranking, Scores, Source
from gatelens.measures.top_k import Circuits
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.settings import Settings
from gatelens.tasks.base import CircuitTask

_RESAMPLES = 1000
_ROWS = 8  # circuits in one piece of work


class CurveSettings(Settings):
    """How a curve is drawn."""

    ranking: Ranking = Field(default="absolute", description="rank gates by the absolute or by the signed score")
    source: Source = Field(default="corrupt", description="what a circuit leaves out is set to: corrupt, mean or zero")
    points: int = Field(default=0, ge=0, description="how many circuits to evaluate (0: a grid that suits the level)")
    random_points: int = Field(default=12, ge=0, description="circuits of the random baseline (0: no baseline)")

    def model_post_init(self, _: object) -> None:
        if self.points == 1:
            raise GatelensError("points is 1: a curve has at least 2 points, or 0 for a grid that suits the level.")


@dataclass(frozen=True, eq=False)
class Curve:
    """The explained effect of a ranking's circuits, for one or several task seeds.

    The metric of every prompt is stored, so that the band can be computed again: a 95 % bootstrap interval over prompts
    and, if there are several, over seeds.
    """

    level: str  # the name of the level
    total: int  # number of gates
    asked: list[int]  # (point,) the k of each top-k circuit
    kept: Float[Tensor, " point"]  # gates in each circuit after pruning, mean over seeds
    metrics: Float[Tensor, "seed point prompt"]
    none: Float[Tensor, "seed prompt"]  # metric with nothing kept
    everything: Float[Tensor, "seed prompt"]  # metric with everything kept
    ranking: Ranking = "absolute"
    source: Source = "corrupt"
    random: Curve | None = None  # a random ranking: the baseline

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

    def count_at(self, threshold: float = 0.9) -> float | None:
        """The smallest number of gates whose effect is at least the threshold, and stays so at the next point.

        None if the curve does not reach it. A curve that ends with everything kept reaches every threshold up to 1.
        """
        point = self.point_at(threshold)
        return None if point is None else float(self.kept[point])

    def point_at(self, threshold: float = 0.9) -> int | None:
        """The index of the point that `count_at` counts; None if the curve does not reach the threshold."""
        reached = (self.effect >= threshold - 1e-6).tolist()
        points = range(len(reached))
        return next((i for i in points if reached[i] and all(reached[i : i + 2])), None)

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
        seeds, prompts = self.none.shape
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randint(prompts, (_RESAMPLES, seeds, prompts), generator=generator)
        weights = torch.zeros(_RESAMPLES, seeds, prompts).scatter_add_(2, drawn, torch.ones(drawn.shape))
        if seeds > 1:
            drawn_seeds = torch.randint(seeds, (_RESAMPLES, seeds), generator=generator)
            times = torch.zeros(_RESAMPLES, seeds).scatter_add_(1, drawn_seeds, torch.ones(drawn_seeds.shape))
            weights = weights * times[..., None]
        effects = self._effects(weights)
        return torch.quantile(effects, 0.025, dim=0), torch.quantile(effects, 0.975, dim=0)


def explained_effect(
    model: Model,
    task: CircuitTask,
    scores: Scores,
    settings: CurveSettings | None = None,
    *,
    grid_end: int | None = None,
    context: Context | None = None,
) -> Curve:
    """The explained effect of keeping the top k gates, with everything else set to its source, for a grid of k.

    Arguments:
        grid_end: the largest k of the grid, if it is above the number of gates. Curves need the same grid to be pooled.

    Returns:
        A curve over one task seed. Cost: ``level.cost.circuit`` forwards for each circuit: 1 for heads and attention
        edges, 1.5 to 2 for edges between components.
    """
    settings, context = settings or CurveSettings(), context or Context()
    circuits = Circuits.of(model, task, scores, settings.ranking, settings.source, context)
    total = max(circuits.total, grid_end or 0)
    curve = _evaluate(circuits, circuits.level.grid(total, settings.points), "curve", settings)
    _refuse_flat((curve.everything - curve.none).mean().item(), circuits.level.noun, model, task)
    if settings.random_points:
        coarse = circuits.level.grid(total, max(2, settings.random_points))
        curve = replace(curve, random=_evaluate(circuits.shuffled(task.seed), coarse, "random", settings))
    return curve


def edges_effect(
    model: Model,
    task: CircuitTask,
    kept: Bool[Tensor, "source destination"],
    source: Source = "corrupt",
    *,
    context: Context | None = None,
) -> tuple[float, float]:
    """The explained effect of a given set of edges, and that of all other edges. Cost: four edge circuits.

    Use it for circuits that other tools wrote (`gatelens.measures.exchange.read_graph`).

    Arguments:
        kept: the edges of the circuit.
        source: what all other edges read.
    """
    edges = Graph.of(model.anatomy).edges.flatten().nonzero()[:, 0]
    chosen = kept.flatten()[edges]
    order, k = torch.cat([edges[chosen], edges[~chosen]]), int(chosen.sum())
    circuits = Circuits(EDGES, model, task, [order], source, context or Context())
    metrics = torch.empty(4, len(task))
    for i, bucket in enumerate(circuits.batches):
        inside = circuits.metric(i, [0, k, circuits.total])
        metrics[:, bucket.which] = torch.cat([inside, circuits.metric(i, [k], complement=True)]).float()
    none, circuit, everything, rest = metrics.mean(1).tolist()
    _refuse_flat(everything - none, EDGES.noun, model, task)
    return (circuit - none) / (everything - none), (rest - none) / (everything - none)


def multiplier(dense: Curve, sparse: Curve, at: float = 0.9) -> float:
    """How many times fewer gates the sparse model needs: dense count / sparse count. Below 1, it needs more."""
    if dense.level != sparse.level:
        raise GatelensError(
            f"a curve of {dense.level} and a curve of {sparse.level} have no multiplier: give curves of the same level."
        )
    counts = dense.count_at(at), sparse.count_at(at)
    if counts[0] is None or counts[1] is None:
        raise GatelensError(
            f"one of the curves does not reach {at}: ask for a lower threshold or evaluate more points."
        )
    return counts[0] / counts[1] if counts[1] else float("inf")


def pool(curves: Sequence[Curve]) -> Curve:
    """Join the curves of several task seeds into one, with a band over seeds and prompts."""
    first = curves[0]
    if any(curve.asked != first.asked or curve.none.shape != first.none.shape for curve in curves):
        raise GatelensError("only curves with the same grid and the same number of prompts can be pooled.")
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


def _evaluate(circuits: Circuits, ks: list[int], name: str, settings: CurveSettings) -> Curve:
    """Evaluate the circuits of a grid that begins with no gates and ends with all of them."""
    cuts = [ks[start : start + _ROWS] for start in range(0, len(ks), _ROWS)]
    context = circuits.context
    context.begin(f"{name}: {circuits.level.noun} kept", len(cuts) * len(circuits.batches))
    metrics = torch.empty(len(ks), len(circuits.task))
    for i, bucket in enumerate(circuits.batches):
        pieces = [context.piece(f"{name}-{i}-{n}", partial(circuits.metric, i, cut)) for n, cut in enumerate(cuts)]
        metrics[:, bucket.which] = torch.cat(pieces).float()
    return Curve(
        level=circuits.level.name,
        total=circuits.total,
        asked=ks,
        kept=torch.tensor(circuits.counts(ks)),
        metrics=metrics[None],
        none=metrics[None, 0],
        everything=metrics[None, -1],
        ranking=settings.ranking,
        source=settings.source,
    )


def _refuse_flat(possible: float, noun: str, model: Model, task: CircuitTask) -> None:
    """Raise an error if leaving out everything hardly changes the metric: the explained effect would divide by 0."""
    if abs(possible) < 1e-6:
        raise GatelensError(
            f"leaving out all {noun} of {model.name} changes the metric of {task.name} by only {possible:.1g}: there "
            f"is no effect to explain. `gatelens tasks {task.name} --model {model.name}` shows whether the model has "
            "this behaviour at all."
        )
