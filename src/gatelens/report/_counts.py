"""The columns of the page's table of counts, and the sentence at its top."""

from __future__ import annotations

import math
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
    return "strong" if _shows_difference(entry) else "unclear"


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
    """The most telling result of a report in one or two sentences; empty if it has no circuits.

    This is the comparison of two models whose interval is farthest from 1. The second sentence says how many of all
    comparisons show a difference, so that one is not taken for all. Without a comparison it is the first count.
    """
    pairs = comparisons(groups)
    if not pairs:
        return next((f"{_needed(group, group.entries[0])}." for group in _in_order(groups)), "")
    telling = most_telling(groups)
    group, entry = telling or pairs[0]
    result = f"{_needed(group, entry)}, and {entry.dense} needs {_dense(group, entry).count}: {entry.multiplier}."
    if telling is None:
        everywhere = f" in any of the {len(pairs)} comparisons" if len(pairs) > 1 else ""
        return f"No difference between models is shown{everywhere}. {result}"
    differing = sum(_shows_difference(other) for _, other in pairs)
    every_pair = f" {differing} of {len(pairs)} comparisons on this page show a difference." if len(pairs) > 1 else ""
    return result + every_pair


def most_telling(groups: Sequence[Group]) -> tuple[Group, Entry] | None:
    """The comparison of two models whose interval excludes 1 and is farthest from it; None if there is none."""
    differing = [(group, entry) for group, entry in comparisons(groups) if _shows_difference(entry)]
    return max(differing, key=lambda pair: _distance(pair[1]), default=None)


def first_view(groups: Sequence[Group]) -> dict[str, str]:
    """The task and the gates that the page shows when it is opened: those of its `lead`. Empty: the first ones."""
    telling = most_telling(groups)
    return {} if telling is None else {"task": telling[0].task, "gates": telling[0].gates}


def comparisons(groups: Sequence[Group]) -> list[tuple[Group, Entry]]:
    """The sparse models that have a multiplier, heads first."""
    return [(group, entry) for group in _in_order(groups) for entry in group.entries if entry.multiplier is not None]


def _in_order(groups: Sequence[Group]) -> list[Group]:
    return sorted(groups, key=lambda group: list(LEVELS).index(group.level))


def _shows_difference(entry: Entry) -> bool:
    return entry.multiplier is not None and entry.multiplier.shows_difference


def _distance(entry: Entry) -> float:
    """How far the near end of an interval that excludes 1 is from 1: the absolute logarithm of this end."""
    assert entry.multiplier is not None
    low, high = entry.multiplier.interval
    if low is not None and low > 1:
        return math.log(low)
    assert high is not None
    return -math.log(high) if high > 0 else math.inf


def _needed(group: Group, entry: Entry) -> str:
    of_all = f"{entry.count} of {entry.result.curve.total:,} {LEVELS[group.level].noun}"
    return f"{entry.label} needs {of_all} for {group.threshold:.0%} of the effect on {group.task}"


def _dense(group: Group, entry: Entry) -> Entry:
    """The run of the dense model that a model is compared with."""
    return next(other for other in group.entries if other.label == entry.dense)


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
