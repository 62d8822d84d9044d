"""Measure the explained effect of top-k circuits: a grid of k, refined around the count, and a random baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from typing import Any, Literal

import torch
from jaxtyping import Bool
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates import EDGES
from gatelens.gates.level import Level, Source
from gatelens.gates.scores import Ranking, Scores
from gatelens.gates.selection import TOP, selection_named, selections
from gatelens.measures.areas import largest_prefixes, mib_counts
from gatelens.measures.curves import Curve
from gatelens.measures.refinement import REFINED_POINTS, ROUNDS, refinement
from gatelens.measures.top_k import Circuits
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.settings import ADDED, Settings
from gatelens.tasks.base import CircuitTask, ResponseTask
from gatelens.tasks.batches import check_circuit_task

_ROWS = 32  # circuits in one piece of work: circuits of one piece share layers


class CurveSettings(Settings):
    """How a curve is drawn."""

    ranking: Ranking = Field(
        default="absolute",
        description="rank gates by each prompt's absolute score (per-prompt), by the absolute value of the mean score, "
        "or by the signed mean",
    )
    selection: str = Field(
        default=TOP,
        description="how a circuit takes gates: " + "; ".join(f"{name} ({s.help})" for name, s in selections().items()),
    )
    source: Source = Field(
        default="corrupt",
        description="what a circuit leaves out is set to: corrupt, mean, zero, or an optimal constant (not for "
        "attention edges)",
    )
    points: int = Field(
        default=0, ge=0, le=10_000, description="how many circuits to evaluate (0: a grid that suits the level)"
    )
    random_points: int = Field(
        default=12, ge=0, le=10_000, description="circuits of the random baseline (0: no baseline)"
    )
    threshold: float = Field(default=0.9, gt=0, le=1, description="explained effect at which gates are counted")
    refine: float = Field(
        default=0.05,
        ge=0,
        lt=1,
        description="add circuits around the count until neighbours differ by this share at most, or by one gate (0: "
        "add none)",
    )
    also_at: tuple[float, ...] = Field(
        default=(), description="another threshold to refine the curve around; repeatable", json_schema_extra=ADDED
    )
    areas: Literal["signed", "absolute", "none"] = Field(
        default="signed", description="ranking of MIB's circuits, for CPR and CMD (none: compute neither)"
    )
    per_query_head: bool = Field(
        default=False,
        description="CPR and CMD count k and v inputs that heads share once for each query head, as MIB does",
    )

    def model_post_init(self, _: object) -> None:
        if self.points == 1:
            raise GatelensError("points is 1: a curve has at least 2 points, or 0 for a grid that suits the level.")
        if wrong := [threshold for threshold in self.also_at if not 0 < threshold <= 1]:
            raise GatelensError(f"also_at is {wrong[0]:g}: a threshold is above 0 and at most 1, such as 0.8.")
        selection_named(self.selection)

    @property
    def refined_at(self) -> tuple[float, ...]:
        """The thresholds that the grid is refined around."""
        return tuple(dict.fromkeys((self.threshold, *self.also_at))) if self.refine else ()

    def circuits(
        self,
        model: Model,
        task: CircuitTask,
        scores: Scores,
        context: Context | None = None,
        fitted_on: CircuitTask | None = None,
    ) -> Circuits:
        """The circuits of these scores, ordered and closed as the settings say.

        Arguments:
            fitted_on: the prompts that optimal constants are fitted on; None: those of the task.
        """
        return Circuits.of(model, task, scores, self.ranking, self.source, context, self.selection, fitted_on)


def explained_effect(
    model: Model,
    task: CircuitTask | Sequence[CircuitTask],
    scores: Scores | Sequence[Scores],
    settings: CurveSettings | None = None,
    *,
    ranked_on: int = 0,
    fitted_on: CircuitTask | Sequence[CircuitTask] | None = None,
    context: Context | None = None,
) -> Curve:
    """The explained effect of keeping the top k gates, with everything else set to its source, for a grid of k.

    The grid is refined around the count at ``settings.threshold``, and around those at ``settings.also_at``.

    Arguments:
        task: the prompts that circuits are evaluated on; a list for several task seeds.
        scores: what gates are ranked by; a list for several task seeds. Gates that all prompts share may have been
            scored on other prompts than those of the task (`gatelens.tasks.batches.hold_out` splits a task).
        ranked_on: how many other prompts the scores come from, for each task seed. The curve records it, so that its
            figures and counts say that its prompts are held out. 0: the scores come from the prompts of the task.
        fitted_on: the prompts that optimal constants are fitted on, if the source is ``optimal``; a list for several
            task seeds. None: those of the task.

    Returns:
        A curve over all task seeds. Cost: ``level.cost.circuit`` forwards for each circuit: 1 for heads and attention
        edges, 1.5 to 2 for edges between components.

    Example:
        curve = gatelens.explained_effect(model, task, scores)
        print(curve.counted(0.9))  # 41 (25 to 144; 64 prompts)
    """
    settings, context = settings or CurveSettings(), context or Context()
    tasks = [task] if isinstance(task, CircuitTask | ResponseTask) else list(task)
    for each in tasks:
        check_circuit_task(each)
    all_scores = [scores] if isinstance(scores, Scores) else list(scores)
    if len(tasks) != len(all_scores):
        raise GatelensError(f"{len(tasks)} tasks and {len(all_scores)} scores: give the scores of each task.")
    fitted = [fitted_on] * len(tasks) if fitted_on is None or isinstance(fitted_on, CircuitTask) else list(fitted_on)
    if len(fitted) != len(tasks):
        raise GatelensError(f"{len(tasks)} tasks and {len(fitted)} tasks to fit constants on: give one for each task.")
    circuits = [
        settings.circuits(model, own, ranked, context if len(tasks) == 1 else context.part(f"seed-{i}"), fit)
        for i, (own, ranked, fit) in enumerate(zip(tasks, all_scores, fitted, strict=True))
    ]
    curve = with_areas(measure_curve(circuits, settings), circuits, all_scores, settings)
    return replace(curve, ranked_on=ranked_on)


def with_areas(curve: Curve, circuits: Sequence[Circuits], scores: Sequence[Scores], settings: CurveSettings) -> Curve:
    """A curve with the circuits on MIB's grid, from which CPR and CMD are computed.

    The circuits keep shares of all gates, of the prompt with the most gates where prompts have their own. If k and v
    inputs that heads share count once for each query head, an edge to such an input stands for as many edges, each with
    its part of the score; it is kept if all of them fit.

    Arguments:
        circuits: of the same task seeds as the curve, by any ranking.
        scores: the scores of each task seed.
    """
    if settings.areas == "none":
        return curve
    asked: list[int] = []
    metrics: list[Tensor] = []
    kept: list[list[float]] = []
    for own, ranked in zip(circuits, scores, strict=True):
        copies = own.level.copies(own.model) if settings.per_query_head else None
        ranking = replace(own, orders=ranked.orders(settings.areas, copies))
        asked = mib_counts(curve.total if copies is None else int(copies[ranking.orders[0]].sum()))
        ks = asked if copies is None else largest_prefixes(ranking.orders[0], copies, asked)
        inner = sorted({k for k in ks if 0 < k < ranking.total})
        inside = dict(zip(inner, _metrics(ranking, inner, "mib"), strict=True)) if inner else {}
        seed = len(metrics)
        ends = {0: curve.none[seed], ranking.total: curve.everything[seed]}
        metrics.append(torch.stack([(inside | ends)[min(k, ranking.total)] for k in ks]))
        kept.append(ranking.counts(ks))
    grid = replace(
        curve,
        asked=asked,
        kept=torch.tensor(kept).mean(0),
        metrics=torch.stack(metrics),
        ranking=settings.areas,
        random=None,
    )
    return replace(curve, mib=grid)


def measure_curve(circuits: Sequence[Circuits], settings: CurveSettings) -> Curve:
    """The curve of these circuits, one ranking for each task seed, and the random baseline.

    All seeds share the grid: the coarse one of the level, and the points that are added around the count.
    """
    first, total = circuits[0], max(own.total for own in circuits)
    # 1. The coarse grid, from no gates to all of them.
    curve = _evaluate(circuits, first.level.grid(total, settings.points), "curve", settings)
    for own, possible in zip(circuits, (curve.everything - curve.none).mean(1).tolist(), strict=True):
        _refuse_flat(possible, own.level.noun, own.model, own.task)
    # 2. More circuits around the count of each threshold and between the ends of its interval.
    for threshold in settings.refined_at:
        left = REFINED_POINTS
        for _ in range(ROUNDS):
            more = refinement(curve, threshold, settings.refine, left) if left else []
            if not more:
                break
            curve = curve.with_points(_evaluate(circuits, more, "refined curve", settings))
            left -= len(more)
    # 3. The baseline.
    if settings.random_points:
        coarse = baseline_grid(first.level, total, settings.random_points)
        shuffled = [own.shuffled(own.task.seed) for own in circuits]
        curve = replace(curve, random=_evaluate(shuffled, coarse, "random", settings))
    return curve


def baseline_grid(level: Level[Any], total: int, points: int) -> list[int]:
    """The numbers of gates to keep in a curve of gates in random order, from 0 to all.

    Such a curve rises only where most gates are kept. Where the level's own grid is spaced by the logarithm, half of
    the numbers are therefore evenly spaced.
    """
    even = points // 2 if level.log_axis else 0
    evenly = {round(i * total / (even + 1)) for i in range(1, even + 1)}
    return sorted({*level.grid(total, max(2, points - even)), *evenly})


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

    Example:
        _, kept = gatelens.read_graph("circuit.json", edge_scores.graph)
        inside, rest = gatelens.edges_effect(model, task, kept)
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


def _evaluate(circuits: Sequence[Circuits], ks: list[int], name: str, settings: CurveSettings) -> Curve:
    """The curve of all seeds on a grid. Only the ends of a grid from no gates to all of them are the true ends."""
    metrics = torch.stack([_metrics(own, ks, name) for own in circuits])
    first = circuits[0]
    return Curve(
        level=first.level.name,
        total=max(own.total for own in circuits),
        asked=ks,
        kept=torch.tensor([own.counts(ks) for own in circuits]).mean(0),
        metrics=metrics,
        none=metrics[:, 0],
        everything=metrics[:, -1],
        ranking=settings.ranking,
        selection=settings.selection,
        source=settings.source,
        fingerprints=tuple(own.task.fingerprint() for own in circuits),
    )


def _metrics(circuits: Circuits, ks: list[int], name: str) -> Tensor:
    """The metric of each circuit on each prompt of one task seed: (point, prompt)."""
    cuts = [ks[start : start + _ROWS] for start in range(0, len(ks), _ROWS)]
    parts = [(_piece_name(name, cut), partial(circuits.metric, ks=cut)) for cut in cuts]
    return circuits.measure(f"{name}: {circuits.level.noun} kept", parts)


def _piece_name(name: str, ks: list[int]) -> str:
    """The name of a piece says which circuits it holds, because a refined grid depends on what was measured before."""
    return f"{name}-{ks[0]}-{ks[-1]}-{sha256(repr(ks).encode()).hexdigest()[:12]}".replace(" ", "-")


def _refuse_flat(possible: float, noun: str, model: Model, task: CircuitTask) -> None:
    """Raise an error if leaving out everything hardly changes the metric: the explained effect would divide by 0."""
    if abs(possible) < 1e-6:
        raise GatelensError(
            f"leaving out all {noun} of {model.name} changes the metric of {task.name} by only {possible:.1g}: there "
            f"is no effect to explain. `gatelens tasks {task.name} --model {model.name}` shows whether the model has "
            "this behaviour at all."
        )
