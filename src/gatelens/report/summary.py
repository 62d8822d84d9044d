"""The summary of circuit runs: how many gates each model needs for each task, and how far to believe it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gatelens.measures.curves import multiplier
from gatelens.report.runs import CircuitRun, labels


@dataclass(frozen=True, eq=False)
class Line:
    """One model in a group."""

    label: str
    run: CircuitRun
    count: float | None  # gates needed for the group's threshold; None: never reached
    random: float | None  # what a random ranking needs
    multiplier: float | None  # dense count / sparse count; only for a sparse model that has a dense one beside it
    dense: str | None  # the dense model of the multiplier


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one task, level and method: dense models first."""

    task: str
    level: str
    method: str
    threshold: float
    lines: list[Line]

    @property
    def title(self) -> str:
        return f"{self.task}, {self.level}, {self.method}"


def summarise(runs: Sequence[CircuitRun]) -> list[Group]:
    """Groups by level, method and task, in the order in which they first occur; counts at the first run's threshold."""
    grouped: dict[tuple[str, str, str], list[CircuitRun]] = {}
    for run in runs:
        settings = run.result.settings
        grouped.setdefault((settings.level, settings.method, run.result.task), []).append(run)
    return [_group(*key, mine) for key, mine in grouped.items()]


def _group(level: str, method: str, task: str, runs: list[CircuitRun]) -> Group:
    threshold = runs[0].result.settings.threshold
    named = labels(sorted(runs, key=lambda run: run.sparse))
    return Group(task, level, method, threshold, [_line(label, named, threshold) for label in named])


def _line(label: str, named: dict[str, CircuitRun], threshold: float) -> Line:
    run = named[label]
    curve = run.result.curve
    count = curve.count_at(threshold)
    random = None if curve.random is None else curve.random.count_at(threshold)
    dense = dense_of(label, named) if run.sparse else None
    if dense is None or count is None or named[dense].result.curve.count_at(threshold) is None:
        return Line(label, run, count, random, None, dense)
    return Line(label, run, count, random, multiplier(named[dense].result.curve, curve, threshold), dense)


def dense_of(label: str, named: dict[str, CircuitRun]) -> str | None:
    """The dense model that a sparse one belongs to: the only one of its shape, or else the one whose name it contains.

    Of several such names the longest counts: ``sparse-gpt2-medium`` also contains ``gpt2``.
    """
    ours = named[label]
    dense = [name for name, run in named.items() if not run.sparse and _same_shape(run, ours)]
    if len(dense) > 1:
        dense = [name for name in dense if named[name].result.model in ours.result.model]
        longest = max((len(named[name].result.model) for name in dense), default=0)
        dense = [name for name in dense if len(named[name].result.model) == longest]
    return dense[0] if len(dense) == 1 else None


def _same_shape(one: CircuitRun, other: CircuitRun) -> bool:
    """Earlier versions did not save the shape: it may be the same."""
    return one.graph is None or other.graph is None or one.graph == other.graph
