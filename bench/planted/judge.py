"""AUROC of every registered method on planted circuits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
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
        seconds: the time that the method took.
    """

    case: str
    kind: str
    level: Level
    method: str
    auroc: float
    seconds: float


def auroc(scores: Scores, truth: Tensor) -> float:
    """The chance that a gate of the circuit has a higher magnitude than one outside it; equal ones count half.

    Gates are ranked per prompt if the method gives scores of single prompts, and by their absolute scores otherwise.
    """
    [gate_set] = scores.gate_sets()
    values = gate_set.priorities("absolute" if gate_set.magnitudes is None else "per-prompt").double()
    inside, outside = values[truth & gate_set.exists], values[~truth & gate_set.exists]
    above, equal = inside[:, None] > outside, inside[:, None] == outside
    return float((above.double() + equal.double() / 2).mean())


def judge(name: str, kind: str, planted: Planted, names: Iterable[str]) -> list[Judged]:
    """Score the gates of one model by these methods, with default settings, on the levels that each works on."""
    judged = []
    for level in LEVELS:
        truth = planted.truth(level)
        for method in filter(lambda method: method.works_on(level), map(method_named, names)):
            start = time.perf_counter()
            torch.manual_seed(0)
            scores = score_gates(level, planted.model, planted.task, method.name)
            value = auroc(scores, truth)
            judged.append(Judged(name, kind, level, method.name, value, time.perf_counter() - start))
    return judged


def summary(judged: Iterable[Judged], level: Level) -> dict[str, dict[str, float]]:
    """By method: the median of all cases, of those set by hand and of those trained, the lowest, and the time.

    The method with the highest median comes first.
    """
    by_method: dict[str, list[Judged]] = {}
    for one in judged:
        if one.level == level:
            by_method.setdefault(one.method, []).append(one)
    rows = {}
    for method, results in by_method.items():
        kinds = {kind: [one.auroc for one in results if one.kind == kind] for kind in ("by hand", "trained")}
        rows[method] = {
            "median": statistics.median(one.auroc for one in results),
            **{kind: statistics.median(values) for kind, values in kinds.items() if values},
            "lowest": min(one.auroc for one in results),
            "seconds": sum(one.seconds for one in results),
        }
    return dict(sorted(rows.items(), key=lambda row: (-row[1]["median"], -row[1]["lowest"], row[0])))
