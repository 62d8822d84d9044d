"""Stability: would other prompts, or other templates, have given the same circuit?

The prompts are split at random into two halves; a second kind of split gives the halves no template in common. A
circuit of the same size is found on each half. The *overlap* says how many gates both circuits share. The *transferred*
effect is that of the circuit of one half on the prompts of the other half, beside its effect on its own half.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.gates.scores import Scores
from gatelens.measures.counts import Interval, Sample
from gatelens.measures.top_k import Circuits
from gatelens.measures.validity import jaccard
from gatelens.runtime.context import Context
from gatelens.runtime.files import write_json
from gatelens.runtime.records import SCHEMA_VERSION, Record, read_record, write_lines
from gatelens.runtime.settings import Settings
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import halves, template_halves

SPLITS: dict[str, Callable[[CircuitTask], tuple[CircuitTask, CircuitTask] | None]] = {
    "prompts": halves,
    "templates": template_halves,
}
"""The kinds of splits: halves of the prompts, and halves that share no template."""
_FILE, _TABLE = "stability.json", "stability.csv"
_RESAMPLES = 1000

Score = Callable[[CircuitTask, Context], Scores]
Ranked = Callable[[CircuitTask, Scores, Context], Circuits]


class StabilityLine(Settings):
    """How far the circuits of two halves agree, for one kind of split."""

    other: str = Field(description="what differs between the halves: prompts or templates")
    splits: int = Field(description="random splits")
    prompts: int = Field(description="prompts of both halves together")
    overlap: float = Field(description="Jaccard index of the circuits of both halves, mean over splits")
    overlap_low: float = Field(description="the smallest overlap of a split")
    overlap_high: float = Field(description="the largest overlap of a split")
    own: float | None = Field(description="effect of a circuit on its own half; None: prompts have their own gates")
    own_low: float | None
    own_high: float | None
    transferred: float | None = Field(description="effect of a half's circuit on the prompts of the other half")
    transferred_low: float | None = Field(description="lower end of the 95 % interval over prompts")
    transferred_high: float | None = Field(description="upper end of the 95 % interval over prompts")

    @property
    def shown(self) -> tuple[str, str, str, str]:
        """What tables print: the overlap, both effects with their intervals, and the prompts."""
        splits = f"{self.splits} split{'s' * (self.splits != 1)}"
        return (
            f"{self.overlap:.2f} ({self.overlap_low:.2f} to {self.overlap_high:.2f})",
            _with_interval(self.own, self.own_low, self.own_high),
            _with_interval(self.transferred, self.transferred_low, self.transferred_high),
            f"{Sample(self.prompts)}, {splits}",
        )


class Stability(Record):
    """The schema of ``stability.json``."""

    k: int = Field(description="gates in each circuit, before those without an effect are removed")
    lines: tuple[StabilityLine, ...] = Field(description="one for each kind of split that the task allows")


def measure_stability(
    task: CircuitTask, k: int, splits: int, score: Score, ranked: Ranked, *, context: Context | None = None
) -> Stability:
    """Find circuits on halves of the prompts, and compare them.

    Arguments:
        k: the size of the circuits.
        splits: random splits of each kind.
        score: called as score(task, context); the scores of all gates.
        ranked: called as ranked(task, scores, context); the circuits of these scores.

    Returns:
        A line for each kind of split; none for templates if all prompts have the same one. Cost of each split: the
        scores of all prompts and, if prompts share their gates, four circuits on all prompts.
    """
    context = context or Context()
    lines = [_line(kind, task, k, splits, score, ranked, context.part(kind)) for kind in SPLITS]
    return Stability(schema_version=SCHEMA_VERSION, k=k, lines=tuple(line for line in lines if line is not None))


def stability_cost(splits: int, scores: float, circuits: float) -> float:
    """Forward passes of one prompt that `measure_stability` takes.

    Arguments:
        scores: those of scoring all gates on all prompts.
        circuits: those of one circuit on all prompts.
    """
    return len(SPLITS) * splits * (scores + 4 * circuits)


def save_stability(stability: Stability, folder: Path) -> None:
    """Write ``stability.json`` and ``stability.csv``."""
    write_json(folder / _FILE, stability.model_dump(mode="json"))
    write_lines(folder / _TABLE, StabilityLine, stability.lines)


def load_stability(folder: Path) -> Stability | None:
    """Read ``stability.json``; None if the run has none."""
    return read_record(folder / _FILE, Stability) if (folder / _FILE).exists() else None


def _line(
    kind: str, task: CircuitTask, k: int, splits: int, score: Score, ranked: Ranked, context: Context
) -> StabilityLine | None:
    overlaps: list[float] = []
    metrics: list[Tensor] = []
    for number in range(splits):
        sides = SPLITS[kind](replace(task, seed=task.seed + number))
        if sides is None or not all(map(len, sides)):
            return None
        part = context.part(f"{number}")
        # 1. A circuit for each half.
        scores = [score(side, part.part(f"half-{i}")) for i, side in enumerate(sides)]
        circuits = [
            ranked(side, own, part.part(f"half-{i}")) for i, (side, own) in enumerate(zip(sides, scores, strict=True))
        ]
        members = [own.membership(k, ranks.orders) for own, ranks in zip(scores, circuits, strict=True)]
        overlaps.append(jaccard(*members))
        # 2. Each circuit on both halves.
        if circuits[0].level.shared:
            metrics.append(_transfer(task, circuits, k, part))
    return StabilityLine(
        other=kind,
        splits=splits,
        prompts=len(task),
        overlap=sum(overlaps) / len(overlaps),
        overlap_low=min(overlaps),
        overlap_high=max(overlaps),
        **_effects(torch.stack(metrics).mean(0) if metrics else None),
    )


def _transfer(task: CircuitTask, circuits: list[Circuits], k: int, context: Context) -> Float[Tensor, "4 prompt"]:
    """The metric on every prompt: no gate, all gates, the circuit of its own half, and that of the other half."""
    place = {id(pair): i for i, pair in enumerate(task.pairs)}
    metrics = torch.empty(4, len(task))
    context.begin("circuits of the other half", sum(len(half.batches) for half in circuits))
    for half, (own, other) in enumerate((circuits, circuits[::-1])):
        moved = replace(own, orders=other.orders)
        pieces = context.pieces(
            [(f"transfer-{half}-{i}", partial(_four, own, moved, i, k)) for i in range(len(own.batches))]
        )
        for bucket, piece in zip(own.batches, pieces, strict=True):
            prompts = [place[id(own.task.pairs[prompt])] for prompt in bucket.which.tolist()]
            metrics[:, prompts] = piece.float()
    return metrics


def _four(own: Circuits, moved: Circuits, batch: int, k: int) -> Float[Tensor, "4 prompt"]:
    return torch.cat([own.ends(batch), own.metric(batch, [k]), moved.metric(batch, [k])])


def _effects(metrics: Float[Tensor, "4 prompt"] | None) -> dict[str, float | None]:
    """The explained effects of own and transferred circuits, with their intervals."""
    if metrics is None:
        return {f"{name}{end}": None for name in ("own", "transferred") for end in ("", "_low", "_high")}
    none, everything, *circuits = metrics.double()
    n = len(none)
    drawn = torch.randint(n, (_RESAMPLES, n), generator=torch.Generator().manual_seed(0))
    possible = everything - none
    effects: dict[str, float | None] = {}
    for name, circuit in zip(("own", "transferred"), circuits, strict=True):
        gained = circuit - none
        draws = gained[drawn].sum(1) / possible[drawn].sum(1)
        low, high = Interval.of(draws.nan_to_num(nan=float("inf"))) if n > 1 else Interval(None, None)
        effects |= {name: float(gained.sum() / possible.sum()), f"{name}_low": low, f"{name}_high": high}
    return effects


def _with_interval(value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return "-"
    interval = "no interval" if low is None or high is None else f"{low:.2f} to {high:.2f}"
    return f"{value:.2f} ({interval})"
