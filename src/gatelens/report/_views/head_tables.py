"""What can be selected on the page (tasks, models, heads by score), and the tables of heads and what they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gatelens.gates.roles import KINDS
from gatelens.gates.scores import rank
from gatelens.measures.head_table import HeadLine, HeadTable
from gatelens.model.components import Head
from gatelens.report._numbers import short
from gatelens.report._runs import RolesRun
from gatelens.report._summary import Entry, Group
from gatelens.report.figures._text import task_title

INTERFERES = 0.5
"""A head interferes with a task if its mean score of interference over seeds is at least this."""


def task_views(groups: Sequence[Group], roles: Mapping[str, RolesRun]) -> list[dict[str, Any]]:
    """What can be selected: tasks; for each task its models; for each model its heads by score and their table.

    Arguments:
        groups: circuit runs.
        roles: runs of head roles, by title. A report without circuits has a task for each of them.
    """
    tasks: dict[str, dict[str, list[Entry]]] = {}
    for group in sorted(groups, key=lambda group: group.level != "heads"):  # scores of heads say most about heads
        for entry in group.entries:
            tasks.setdefault(group.task, {}).setdefault(entry.label, []).append(entry)
    if not tasks:
        return [_task(title, [_roles_only(title, run)]) for title, run in roles.items()]
    return [_task(task, [_model(label, models, roles) for label in models]) for task, models in tasks.items()]


def _task(name: str, models: list[dict[str, Any]]) -> dict[str, Any]:
    return {"name": name, "title": task_title(name), "models": models}


def _model(label: str, models: Mapping[str, Sequence[Entry]], roles: Mapping[str, RolesRun]) -> dict[str, Any]:
    """One model of a task. models: the runs of all models of the task, by label."""
    entries = models[label]
    model = entries[0].result.model
    own = [run for run in roles.values() if run.result.model == model]
    table = next((_beside_dense(entry, models) for entry in entries if entry.result.heads is not None), None)
    return {
        "label": label,
        "sparse": entries[0].result.sparse,
        **_ranked_heads(entries),
        "table": None if table is None else _table(table, own),
        "interfering": [_interfering(run) for run in own],
    }


def _ranked_heads(entries: Sequence[Entry]) -> dict[str, Any]:
    """The heads by score, from the first run that has scores of heads, and what gave these scores."""
    for entry in entries:
        if order := _heads_by_score(_weights(entry)):
            settings = entry.result.settings
            of = "" if settings.level == "heads" else f" ({settings.level})"
            return {"heads": order, "ranked_by": settings.method + of}
    return {"heads": [], "ranked_by": None}


def _beside_dense(entry: Entry, models: Mapping[str, Sequence[Entry]]) -> HeadTable | None:
    """The table of a run with that of its dense model: as it was saved with it, or from the run of the dense model."""
    table = entry.result.heads
    if table is None or table.dense is not None or entry.dense is None:
        return table
    return table.beside(next((dense.result.heads for dense in models[entry.dense] if dense.result.heads), None))


def _table(table: HeadTable, roles: Sequence[RolesRun]) -> dict[str, Any]:
    """The table of heads of a run, with the roles of the heads, and each head of the dense model that is described."""
    lines = [_line(line, roles) for line in table.lines]
    dense = None
    if table.dense is not None:
        same_heads = [table.dense.line(line.head) for line in table.lines]
        dense = {"model": table.dense.model, "lines": [line and _line(line, ()) for line in same_heads]}
    return {"prompts": table.prompts, "metric": table.metric, "effect": table.effect, "lines": lines, "dense": dense}


def _roles_only(title: str, run: RolesRun) -> dict[str, Any]:
    """The model of a report without circuits: its heads are listed by facilitation."""
    heads = _heads_by_score(run.result.roles.facilitation.mean(0))
    interfering = [_interfering(run)]
    label, sparse = run.result.model, run.result.sparse
    return {
        "label": label,
        "sparse": sparse,
        "heads": heads,
        "ranked_by": "facilitation",
        "table": None,
        "interfering": interfering,
    }


def _weights(entry: Entry) -> Tensor | None:
    """A number that ranks the heads of a run (layer, head), mean over task seeds."""
    weights = [weights for scores in entry.run.scores if (weights := scores.head_weights()) is not None]
    return torch.stack(weights).mean(0) if weights else None


def _heads_by_score(weights: Tensor | None) -> list[list[Any]]:
    """[name, score] of every head, the largest absolute score first."""
    if weights is None:
        return []
    values, order = weights.flatten(), rank(weights.abs().flatten())
    names = [str(Head(*divmod(place, weights.shape[1]))) for place in order.tolist()]
    return [[name, score] for name, score in zip(names, short(values[order]), strict=True)]


def _line(line: HeadLine, roles: Sequence[RolesRun]) -> dict[str, Any]:
    head = Head.parse(line.head)
    return {
        "head": line.head,
        **{name: getattr(line, name) for name in ("score", "low", "high", "share", "answer", "wrong")},
        "looks": [[role, round(share, 4)] for role, share in line.looks_at()],
        "writes": list(line.writes),
        "kinds": list(line.kinds),
        "open": line.open_keys,
        "roles": list(_roles_of(head, roles)),
    }


def _roles_of(head: Head, roles: Sequence[RolesRun]) -> Iterator[dict[str, Any]]:
    """The scores of each kind for a head, mean over seeds, in each run of head roles that has the head."""
    for run in roles:
        scores = {kind: run.result.roles.kind(kind).mean(0) for kind in KINDS}
        n_layers, n_heads = scores[KINDS[0]].shape
        if head.layer < n_layers and head.index < n_heads:
            by_kind = {kind: round(float(map_[head.layer, head.index]), 3) for kind, map_ in scores.items()}
            yield {"task": run.result.task, "scores": by_kind}


def _interfering(run: RolesRun) -> dict[str, Any]:
    """The heads that interfere with a task, the worst first."""
    ordered = _heads_by_score(run.result.roles.interference.mean(0))
    heads = [[name, score] for name, score in ordered if score >= INTERFERES]
    return {"task": run.result.task, "seeds": len(run.result.roles.plus), "heads": heads}
