"""Head maps of the page: a score for each layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gatelens.gates import LEVELS
from gatelens.gates.roles import KINDS
from gatelens.report._numbers import short
from gatelens.report._runs import RolesRun
from gatelens.report._summary import Group


def map_views(groups: Sequence[Group], roles: Mapping[str, RolesRun]) -> list[dict[str, Any]]:
    """One view for each run of head roles and for each group of head scores; a view has one or more maps.

    Arguments:
        groups: circuit runs. Scores of attention edges are summed over each head.
        roles: runs of head roles, by title.
    """
    views = [
        _map_view(f"scores: {group.title}", group.task, LEVELS[group.level].head_map, group.head_scores)
        for group in groups
        if group.head_scores
    ]
    for title, run in roles.items():
        maps = {kind: run.result.roles.kind(kind).mean(0) for kind in KINDS}
        views.append(_map_view(f"roles: {title}", None, "score, mean over seeds", maps))
    return views


def _map_view(title: str, task: str | None, label: str, maps: Mapping[str, Tensor]) -> dict[str, Any]:
    most = max(float(scores.abs().max()) for scores in maps.values())
    signed = any(bool((scores < 0).any()) or bool((scores > 1).any()) for scores in maps.values())
    return {
        "title": title,
        "task": task,  # None: shown with every task
        "label": label,
        "low": -most if signed else 0,
        "high": most if signed else 1,
        "signed": signed,
        "maps": [{"name": name, "z": [short(layer) for layer in scores]} for name, scores in maps.items()],
    }
