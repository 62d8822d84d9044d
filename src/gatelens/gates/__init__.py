"""Run a model with gates: hooks, runs, gradients, and one file for each level."""

from __future__ import annotations

from typing import Any

from gatelens.errors import GatelensError
from gatelens.gates.attention import ATTENTION
from gatelens.gates.edges import EDGES
from gatelens.gates.heads import HEADS
from gatelens.gates.level import Level
from gatelens.gates.role_edges import ROLE_EDGES
from gatelens.runtime.settings import unknown_name

LEVELS: dict[str, Level[Any]] = {level.name: level for level in (HEADS, EDGES, ROLE_EDGES, ATTENTION)}
"""All levels by name."""


def level_named(name: str) -> Level[Any]:
    """The level with this name; an error lists the names that exist."""
    if name not in LEVELS:
        raise GatelensError(unknown_name("level", name, LEVELS))
    return LEVELS[name]


__all__ = ["ATTENTION", "EDGES", "HEADS", "LEVELS", "ROLE_EDGES", "level_named"]
