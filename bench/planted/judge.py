"""AUROC and precision of every registered method on planted circuits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bench.planted.case import Planted
from gatelens import Scores, score_gates
from gatelens.methods.registry import method_named

Level = Literal["edges", "heads"]
LEVELS: tuple[Level, ...] = ("edges", "heads")


@dataclass(frozen=True)
class Judged:
    """How well one method found one planted circuit.

    Arguments:
        auroc: the chance that a gate of the circuit is ranked above another gate, where equal scores count half; 0 to
            1, and 0.5 for a random ranking.
        precision: the share of the circuit among the best gates, as many as the circuit has; 0 to 1.
        seconds: the processor time that the method took.
    """

    case: str
    kind: str
    level: Level
    method: str
    auroc: float
    precision: float
    seconds: float


def auroc(scores: Scores, truth: Tensor) -> float:
    """The chance that a gate of the circuit has a higher magnitude than one outside it; equal ones count half."""
    inside, outside = magnitudes(scores, truth)
    above, equal = inside[:, None] > outside, inside[:, None] == outside
    return float((above.double() + equal.double() / 2).mean())


def precision(scores: Scores, truth: Tensor) -> float:
    """The share of the circuit among the best gates, as many as the circuit has (R-precision).

    Of gates that share the last place, the expected number is counted, as if they were drawn at random.
    """
    inside, outside = magnitudes(scores, truth)
    last = torch.cat([inside, outside]).topk(len(inside)).values[-1]
    better, worse = (int((part > last).sum()) for part in (inside, outside))
    equal, equal_outside = (int((part == last).sum()) for part in (inside, outside))
    places_left = len(inside) - better - worse
    return (better + places_left * equal / (equal + equal_outside)) / len(inside)


def magnitudes(scores: Scores, truth: Tensor) -> tuple[Tensor, Tensor]:
    """The magnitudes of the gates of a circuit, and of all others.

    Gates are ranked per prompt if the method gives scores of single prompts, and by their absolute scores otherwise.
    """
    [gate_set] = scores.gate_sets()
    values = gate_set.priorities("absolute" if gate_set.magnitudes is None else "per-prompt").double()
    return values[truth & gate_set.exists], values[~truth & gate_set.exists]


def judge(name: str, kind: str, planted: Planted, names: Iterable[str]) -> list[Judged]:
    """Score the gates of one model by these methods, with default settings, on the levels that each works on."""
    judged = []
    for level in LEVELS:
        truth = planted.truth(level)
        for method in filter(lambda method: method.works_on(level), map(method_named, names)):
            start = time.process_time()
            torch.manual_seed(0)
            scores = score_gates(level, planted.model, planted.task, method.name)
            seconds = time.process_time() - start
            found = auroc(scores, truth), precision(scores, truth)
            judged.append(Judged(name, kind, level, method.name, *found, seconds))
    return judged


def complete(judged: Iterable[Judged], level: Level, cases: Iterable[tuple[str, str]]) -> dict[str, list[Judged]]:
    """By method: its results on these models (name, kind), in their order. Methods that miss a model are left out."""
    found = {(one.case, one.kind, one.method): one for one in judged if one.level == level}
    names = sorted({method for *_, method in found})
    wanted = {name: [found.get((*case, name)) for case in cases] for name in names}
    return {name: [one for one in results if one] for name, results in wanted.items() if all(results)}


def summary(by_method: Mapping[str, list[Judged]], kinds: Sequence[str]) -> dict[str, dict[str, float]]:
    """By method: medians and the lowest AUROC and precision of its results, medians of each kind, and its time.

    The method with the highest median AUROC comes first; of equal ones, that with the highest median precision.
    """
    rows = {}
    for method, results in by_method.items():
        aurocs, precisions = [one.auroc for one in results], [one.precision for one in results]
        rows[method] = {
            "median": statistics.median(aurocs),
            **{kind: statistics.median(one.auroc for one in results if one.kind == kind) for kind in kinds},
            "lowest": min(aurocs),
            "precision": statistics.median(precisions),
            "lowest precision": min(precisions),
            "seconds": sum(one.seconds for one in results),
        }
    return dict(
        sorted(rows.items(), key=lambda row: (-row[1]["median"], -row[1]["precision"], -row[1]["lowest"], row[0]))
    )
