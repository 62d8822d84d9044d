"""The headline figure of the page: explained effect against the number of gates kept, for each level and method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gatelens.gates import LEVELS
from gatelens.gates.selection import selected
from gatelens.measures.curves import Curve
from gatelens.report._components import component_name
from gatelens.report._numbers import short
from gatelens.report._runs import CircuitRun
from gatelens.report._summary import Entry, Group
from gatelens.report.figures._text import task_title

_MOST_GATES = 2000  # gates of a ranking that the page knows by name


def curve_views(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One view for each level and method, with a panel for each task. Levels stand in the order of `LEVELS`."""
    views: dict[tuple[str, str], dict[str, Any]] = {}
    for group in sorted(groups, key=lambda group: list(LEVELS).index(group.level)):
        level = LEVELS[group.level]
        empty: dict[str, Any] = {"title": group.gates, "noun": level.noun, "log": level.log_axis, "panels": []}
        view = views.setdefault((group.level, group.method), empty)
        view["panels"].append(
            {
                "task": group.task,
                "title": task_title(group.task),
                "threshold": group.threshold,
                "models": [_model(entry) for entry in group.entries],
                "ratios": [_ratio(entry) for entry in group.entries if entry.multiplier is not None],
            }
        )
    return list(views.values())


def components_in_order(run: CircuitRun, most: int = _MOST_GATES) -> list[str]:
    """The component that each gate of the run's ranking acts on, best first; of an edge, the head at one of its ends.

    Empty if the scores were not saved or if prompts have their own gates.
    """
    settings = run.result.settings
    if not run.scores or not LEVELS[settings.level].shared:
        return []
    scores = run.scores[0]
    [order] = selected(scores, settings.ranking, settings.selection)
    ends = (scores.ends(scores.gate(0, place)[0]) for place in order[:most].tolist())
    return [_component(pair) for pair in ends]


def _component(ends: tuple[str, ...]) -> str:
    names = [component_name(end) for end in ends]
    return next((name for name in names if "H" in name), names[0])


def _model(entry: Entry) -> dict[str, Any]:
    curve = entry.result.curve
    return {
        "label": entry.label,
        "sparse": entry.result.sparse,
        "total": curve.total,
        "count": entry.count.value,
        "needed": str(entry.count),
        "asked": curve.asked,
        **_points(curve),
        "random": None if curve.random is None else _points(curve.random),
        "order": components_in_order(entry.run),
    }


def _points(curve: Curve) -> dict[str, list[float]]:
    return {name: short(getattr(curve, name)) for name in ("kept", "effect", "low", "high")}


def _ratio(entry: Entry) -> dict[str, Any]:
    assert entry.multiplier is not None
    return {
        "dense": entry.dense,
        "sparse": entry.label,
        "brief": entry.multiplier.brief,
        "text": str(entry.multiplier),
        "clear": entry.multiplier.shows_difference,
    }
