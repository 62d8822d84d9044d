"""The prompts of a circuit job: gates are ranked on some, and circuits are evaluated on the same or on others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gatelens.errors import GatelensError
from gatelens.jobs._task import task_of
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.model import Model
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import hold_out
from gatelens.tasks.token_roles import share_names


@dataclass(frozen=True, eq=False)
class CircuitTasks:
    """The prompts of a circuit job, as one task for each task seed.

    Arguments:
        evaluated: the prompts that circuits are evaluated on.
        ranked: the prompts that gates are ranked on.
        held_out: whether the two share no prompt; otherwise they are the same.
    """

    evaluated: list[CircuitTask]
    ranked: list[CircuitTask]
    held_out: bool

    @property
    def first(self) -> CircuitTask:
        """The prompts of the first task seed that circuits are evaluated on."""
        return self.evaluated[0]

    @property
    def ranked_on(self) -> int:
        """How many other prompts gates are ranked on, for each task seed; 0 if no prompts are held out."""
        return len(self.ranked[0]) if self.held_out else 0

    @property
    def fitted_on(self) -> Sequence[CircuitTask | None]:
        """The prompts that optimal constants are fitted on; None: those that circuits are evaluated on."""
        return self.ranked if self.held_out else [None] * len(self.evaluated)

    @property
    def longest(self) -> int:
        """The number of tokens of the longest prompt that circuits are evaluated on."""
        return max(bucket.clean.shape[1] for task in self.evaluated for bucket in task.buckets)

    def identity(self) -> dict[str, Any]:
        """What identifies the prompts in the request of a run."""
        identity = {**self.first.spec(), "fingerprints": [task.fingerprint() for task in self.evaluated]}
        return identity | ({"ranked_on": [task.fingerprint() for task in self.ranked]} if self.held_out else {})


def circuit_tasks(
    model: Model, task: str | CircuitTask, settings: CircuitSettings, options: Mapping[str, Any] | None = None
) -> CircuitTasks:
    """Build the tasks of all task seeds. If prompts are held out, a task that is given is split in half.

    Arguments:
        task, options: as for `find_circuit`.
    """
    n = 2 * settings.n if settings.ranks_on_others else settings.n
    n_seeds = 1 if isinstance(task, CircuitTask) else settings.seeds
    tasks: list[CircuitTask] = []
    for seed in range(settings.seed, settings.seed + n_seeds):
        seeded = task_of(task, model, n, seed, options)
        if not isinstance(seeded, CircuitTask):
            raise GatelensError(
                f"the task {seeded.name} has target responses and no corrupt prompts: use `gatelens gate` for it."
            )
        tasks.append(seeded)
    roles = share_names([seeded.token_roles for seeded in tasks])  # so that circuits of seeds can be compared
    tasks = [replace(seeded, token_roles=own) for seeded, own in zip(tasks, roles, strict=True)]
    if not settings.ranks_on_others:
        return CircuitTasks(tasks, tasks, held_out=False)
    ranked, evaluated = zip(*map(_split, tasks), strict=True)
    return CircuitTasks(list(evaluated), list(ranked), held_out=True)


def _split(task: CircuitTask) -> tuple[CircuitTask, CircuitTask]:
    """Two halves of a task, which share no prompt: to rank gates on, and to evaluate circuits on."""
    ranked, evaluated = hold_out(task, len(task) // 2)
    repeated = {pair.clean for pair in ranked.pairs} & {pair.clean for pair in evaluated.pairs}
    if repeated or not len(evaluated):
        different = len({pair.clean for pair in task.pairs})
        raise GatelensError(
            f"the task {task.name} has too few different prompts ({different}) to rank gates on {len(ranked)} and to "
            f"evaluate circuits on {len(evaluated)} others: ask for fewer prompts, or set held_out to false."
        )
    return ranked, evaluated
