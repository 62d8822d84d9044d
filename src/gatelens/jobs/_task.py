"""The task of a job, which is given by its name or as a task."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.tasks import task as make_task
from gatelens.tasks.base import CircuitTask, ResponseTask

Task = CircuitTask | ResponseTask


def task_of(task: str | Path | Task, model: Model, n: int, seed: int, options: Mapping[str, Any] | None = None) -> Task:
    """The task itself, or the one with this name.

    Arguments:
        task: a name (`gatelens tasks` lists them), a .jsonl file, or a task, which is returned as it is.
        n: prompts or examples of a task that is made by its name.
        seed: the seed of a task that is made by its name.
        options: options of a task that is made by its name.
    """
    if isinstance(task, CircuitTask | ResponseTask):
        if options:
            raise GatelensError(
                f"the task {task.name} is already made, so the options {', '.join(options)} cannot change it: give "
                "them to gatelens.task, or give the name of the task."
            )
        return task
    return make_task(task, model, n=n, seed=seed, **(options or {}))


def task_identity(task: Task) -> dict[str, Any]:
    """What identifies a task in the request of a run: how it was made, and the fingerprint of its tokens."""
    return {**task.spec(), "fingerprint": task.fingerprint()}
