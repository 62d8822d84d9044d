"""The summary of circuit runs: how many gates each model needs for each task, and how far to trust that number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gatelens.gates import LEVELS
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.counts import Count, Multiplier
from gatelens.measures.pairing import dense_circuit_of, multiplier_of
from gatelens.report._runs import CircuitRun, labels

PUBLISHED_ORDER = ("greater-than", "ioi", "docstring", "ioi-long")
"""The tasks of the published figures, in the order of their panels."""


@dataclass(frozen=True, eq=False)
class Entry:
    """One run in a group."""

    label: str
    run: CircuitRun
    count: Count  # gates needed for the threshold
    random: Count | None  # gates that a random ranking needs; None if there is no baseline
    dense: str | None  # the label of the dense model that this model is compared with
    multiplier: Multiplier | None  # dense count / sparse count, if there is a dense model and both counts are reached

    @property
    def result(self) -> CircuitResult:
        return self.run.result


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one task, level, method and threshold: dense models first."""

    task: str
    level: str
    method: str  # with the threshold, if the report has several
    threshold: float
    entries: list[Entry]

    @property
    def title(self) -> str:
        return f"{self.task}, {self.level}, {self.method}"

    @property
    def gates(self) -> str:
        """The kind of gates and the method that scored them."""
        return f"{LEVELS[self.level].noun}, {self.method}"

    @property
    def head_scores(self) -> dict[str, Tensor]:
        """The scores of heads (layer, head) by label, for the runs that have them."""
        scores = {entry.label: entry.run.head_scores for entry in self.entries}
        return {label: head_scores for label, head_scores in scores.items() if head_scores is not None}


def summarise(runs: Sequence[CircuitRun]) -> list[Group]:
    """Group runs by level, method, task and threshold.

    Groups stand in the order of the tasks in the published figures; those of other tasks follow, in the order in which
    they first occur.
    """
    place = {task: number for number, task in enumerate(PUBLISHED_ORDER)}
    grouped: dict[tuple[str, str, str, float], list[CircuitRun]] = {}
    for run in sorted(runs, key=lambda run: place.get(run.result.task, len(place))):
        settings = run.result.settings
        grouped.setdefault((settings.level, settings.method, run.result.task, settings.threshold), []).append(run)
    groups = [_group(*key, members) for key, members in grouped.items()]
    if len({group.threshold for group in groups}) > 1:
        groups = [replace(group, method=f"{group.method} at {group.threshold:.0%}") for group in groups]
    return groups


def _group(level: str, method: str, task: str, threshold: float, runs: list[CircuitRun]) -> Group:
    by_label = labels(sorted(runs, key=lambda run: run.result.sparse))
    label_of = {run.result: label for label, run in by_label.items()}
    return Group(task, level, method, threshold, [_entry(label, run, label_of) for label, run in by_label.items()])


def _entry(label: str, run: CircuitRun, label_of: Mapping[CircuitResult, str]) -> Entry:
    result = run.result
    random = result.curve.random
    dense = dense_circuit_of(result, label_of)
    return Entry(
        label,
        run,
        result.count,
        None if random is None else random.counted(result.settings.threshold),
        None if dense is None else label_of[dense],
        multiplier_of(dense, result),
    )
