"""Describe runs in words: their title, and the settings that they were made with."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelens.report._runs import CircuitRun, Run, SparsifyRun
from gatelens.report._summary import Group


def describe(run: Run) -> dict[str, Any]:
    """The title of a run, and its settings as pairs of name and value."""
    if isinstance(run, SparsifyRun):
        title = f"sparsify: {run.name}"
        facts: dict[str, Any] = {"steps made": int(run.log[-1]["step"])}
    else:
        result = run.result
        title = f"{run.asked['kind']}: {result.task} in {result.model}"
        facts = {"attention": "gated (sparse)" if result.sparse else "dense", "seconds": f"{result.seconds:.0f}"}
        if isinstance(run, CircuitRun):
            title += f", {run.result.settings.level}, {run.result.settings.method}"
            if run.result.graph is None:
                facts["note"] = "saved by an earlier version, without a circuit graph and attention"
            elif not run.prompts:
                facts["note"] = "without attention, because the prompts are too long to save it"
    return {"title": title, "facts": [("folder", place(run.folder)), *_flat(facts), *_flat(run.asked)]}


def place(folder: Path) -> str:
    """The path of a run from the current folder, or its last two parts, so that a shared page shows no local paths."""
    relative = os.path.relpath(folder)
    return "/".join(folder.resolve().parts[-2:]) if relative.startswith("..") else relative


def models_with_shared_inputs(groups: Sequence[Group]) -> list[str]:
    """The models whose k and v inputs belong to several heads at once, which changes the number of edges."""
    graphs = {
        entry.result.model: entry.result.graph for group in groups for entry in group.entries if group.level == "edges"
    }
    return [model for model, graph in graphs.items() if graph is not None and graph.n_heads != graph.n_kv_heads]


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)
