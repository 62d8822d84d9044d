"""The summary of circuit runs: how many gates each model needs for each task, and how far to trust that number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from gatelens.measures.curves import multiplier
from gatelens.measures.pairing import ComparedRun, dense_run_of
from gatelens.report._runs import CircuitRun, labels


@dataclass(frozen=True, eq=False)
class Entry:
    """One run in a group."""

    label: str
    run: CircuitRun
    count: float | None  # gates needed for the threshold; None if the curve does not reach it
    random: float | None  # gates that a random ranking needs
    dense: str | None  # the label of the dense model that this model is compared with
    multiplier: float | None  # dense count / sparse count, if there is a dense model and both counts are reached


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
    def head_scores(self) -> dict[str, Tensor]:
        """The scores of heads (layer, head) by label, for the runs that have them."""
        scores = {entry.label: entry.run.head_scores for entry in self.entries}
        return {label: head_scores for label, head_scores in scores.items() if head_scores is not None}


def summarise(runs: Sequence[CircuitRun]) -> list[Group]:
    """Group runs by level, method, task and threshold, in the order in which these first occur."""
    grouped: dict[tuple[str, str, str, float], list[CircuitRun]] = {}
    for run in runs:
        settings = run.result.settings
        grouped.setdefault((settings.level, settings.method, run.result.task, settings.threshold), []).append(run)
    groups = [_group(*key, members) for key, members in grouped.items()]
    if len({group.threshold for group in groups}) > 1:
        groups = [replace(group, method=f"{group.method} at {group.threshold:.0%}") for group in groups]
    return groups


def _group(level: str, method: str, task: str, threshold: float, runs: list[CircuitRun]) -> Group:
    by_label = labels(sorted(runs, key=lambda run: run.sparse))
    compared = {label: _compared(run) for label, run in by_label.items()}
    label_of = {run: label for label, run in compared.items()}
    dense_labels: dict[str, str | None] = {}
    for label, run in compared.items():
        dense = dense_run_of(run, compared.values())
        dense_labels[label] = None if dense is None else label_of[dense]
    entries = [_entry(label, dense_labels[label], by_label, threshold) for label in by_label]
    return Group(task, level, method, threshold, entries)


def _compared(run: CircuitRun) -> ComparedRun:
    result = run.result
    return ComparedRun(result.model, run.sparse, result.task, result.settings.model_dump(), run.dense, run.graph)


def _entry(label: str, dense: str | None, runs: Mapping[str, CircuitRun], threshold: float) -> Entry:
    curve = runs[label].result.curve
    count = curve.count_at(threshold)
    random = None if curve.random is None else curve.random.count_at(threshold)
    ratio = None
    if dense is not None:
        dense_curve = runs[dense].result.curve
        if count is not None and dense_curve.count_at(threshold) is not None:
            ratio = multiplier(dense_curve, curve, threshold)
    return Entry(label, runs[label], count, random, dense, ratio)
