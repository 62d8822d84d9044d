"""The columns of the page's table of counts, and the sentence at its top."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gatelens.gates import LEVELS
from gatelens.report._numbers import decimal
from gatelens.report._summary import Entry, Group

_NONE = "-"
_MOST_NAMES = 4  # tasks and models that the heading names


@dataclass(frozen=True)
class Column:
    """A column: its title, and the text and the style class of a cell."""

    title: str
    text: Callable[[Entry], str]
    kind: Callable[[Entry], str] = lambda _: ""


def _multiplier_kind(entry: Entry) -> str:
    return "strong" if entry.multiplier is not None and entry.multiplier.shows_difference else "unclear"


_COLUMNS = (
    Column("Needed", lambda entry: str(entry.count), lambda _: "strong"),
    Column("of", lambda entry: f"{entry.result.curve.total:,}"),
    Column("Random ranking", lambda entry: str(entry.random or _NONE)),
    Column("Multiplier", lambda entry: str(entry.multiplier or _NONE), _multiplier_kind),
    Column("Effect", lambda entry: decimal(entry.result.validity.effect)),
    Column("Effect of the rest", lambda entry: decimal(entry.result.validity.complement)),
    Column("Correlation", lambda entry: entry.result.validity.shown),
    Column("Overlap", lambda entry: decimal(entry.result.validity.overlap)),
)


def count_columns(groups: Sequence[Group]) -> list[Column]:
    """The columns that have a number for at least one run."""
    entries = [entry for group in groups for entry in group.entries]
    return [column for column in _COLUMNS if any(column.text(entry) != _NONE for entry in entries)]


def heading(groups: Sequence[Group]) -> str:
    """The tasks and models of a report, for its title; empty if it has no circuits."""
    tasks = dict.fromkeys(group.task for group in groups)
    models = dict.fromkeys(entry.result.model for group in groups for entry in group.entries)
    return f"{_listed(list(tasks))} in {_listed(list(models))}" if groups else ""


def lead(groups: Sequence[Group]) -> str:
    """The first result in one sentence: the first comparison of two models or, without one, the first count."""
    in_order = sorted(groups, key=lambda group: list(LEVELS).index(group.level))
    pairs = [(group, entry) for group in in_order for entry in group.entries if entry.multiplier is not None]
    singles = [(group, group.entries[0]) for group in in_order]
    if not singles:
        return ""
    group, entry = (pairs or singles)[0]
    share = f"{group.threshold:.0%} of the effect on {group.task}"
    needed = f"{entry.label} needs {entry.count} of {entry.result.curve.total:,} {LEVELS[group.level].noun} for {share}"
    dense = next((other for other in group.entries if other.label == entry.dense), None)
    return f"{needed}." if dense is None else f"{needed}, and {dense.label} needs {dense.count}: {entry.multiplier}."


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
