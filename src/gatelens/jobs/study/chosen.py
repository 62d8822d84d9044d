"""Which cells of a study a command runs: conditions such as ``model=smollm2``, or patterns of cell names.

A cluster gives each of its jobs other cells of the same study in the same folder. A model that is not there yet leaves
its cells for later.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from gatelens.errors import GatelensError, shortened
from gatelens.jobs.study._cells import Cell
from gatelens.runtime.settings import unknown_name

_KEYS = ("cell", "model", "task", "level")  # besides the settings of a job


def chosen_cells(cells: Sequence[Cell], conditions: Sequence[str]) -> list[Cell]:
    """The cells that fulfil the conditions; all cells if there is none.

    Conditions on the same key are alternatives, conditions on different keys must all hold.

    Example:
        chosen_cells(study.cells, ["model=smollm2", "task=ioi", "task=docstring"])

    Arguments:
        conditions: ``KEY=PATTERN`` or a pattern of cell names. A key is ``cell``, ``model``, ``task``, ``level`` or a
            setting of the job, such as ``method``. A pattern is a value, in which ``*`` stands for any text.
    """
    patterns: dict[str, list[str]] = {}
    for condition in conditions:
        key, equals, pattern = condition.partition("=")
        key, pattern = (key, pattern) if equals else ("cell", condition)
        _check(cells, key, pattern)
        patterns.setdefault(key, []).append(pattern)
    chosen = [cell for cell in cells if all(_fits(cell, key, wanted) for key, wanted in patterns.items())]
    if not chosen:
        raise GatelensError(
            f"no cell of the study fulfils all of {', '.join(map(shortened, conditions))}: leave one condition out, or "
            "list the cells with --dry-run."
        )
    return chosen


def _check(cells: Sequence[Cell], key: str, pattern: str) -> None:
    """Raise an error that says what there is, if no cell has the key or a value that fits the pattern."""
    keys = dict.fromkeys((*_KEYS, *(name for cell in cells for name in type(cell.settings).model_fields)))
    if key not in keys:
        raise GatelensError(unknown_name("key of cells", key, keys))
    if not any(_fits(cell, key, [pattern]) for cell in cells):
        values = dict.fromkeys(value for cell in cells if (value := _value(cell, key)) is not None)
        raise GatelensError(unknown_name(key, pattern, values))


def _fits(cell: Cell, key: str, patterns: Sequence[str]) -> bool:
    value = _value(cell, key)
    return value is not None and any(fnmatchcase(value, pattern) for pattern in patterns)


def _value(cell: Cell, key: str) -> str | None:
    """What a cell has at the key, as text; None for a setting that its job does not have."""
    own: dict[str, Any] = {"cell": cell.name, "model": cell.model.label, "task": cell.task, "level": cell.level}
    value = own[key] if key in own else getattr(cell.settings, key, None)
    return None if value is None else str(value)
