"""The roles of positions that gates belong to, on a task and on one batch of its prompts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.token_roles import LAST


@dataclass(frozen=True, eq=False)
class GateRoles:
    """The roles that gates belong to.

    Arguments:
        names: the names of the roles. The last one is the role of the last position, where the logits are read.
        sees: whether a position of the second role is at or before one of the first role, in at least one prompt.
        ids: the role of every position of a batch, as numbers of names; None: not of a batch.
    """

    names: tuple[str, ...]
    sees: Bool[Tensor, "role role"]
    ids: Int[Tensor, "prompt position"] | None = None

    @classmethod
    def named_by(cls, task: CircuitTask) -> GateRoles:
        """The roles of a task. An error is raised if the task names none."""
        if not task.token_roles.are_named:
            raise GatelensError(
                f"the task {task.name} names no roles of tokens with this tokenizer, so it has no edges by role: use "
                "the level edges, or add 'roles' to the prompts of the task."
            )
        names = (*(name for name in task.role_names if name != LAST), LAST)
        return cls(names, torch.zeros(len(names), len(names), dtype=torch.bool))

    def on(self, task: CircuitTask, batch: Bucket | None = None) -> GateRoles:
        """The same roles on the prompts of another task, or of one of its batches. The task has no other roles."""
        if unknown := [name for name in task.role_names if name not in self.names]:
            raise GatelensError(
                f"the task {task.name} has tokens of the role '{unknown[0]}', and these gates have the roles "
                f"{', '.join(self.names)}: score the edges on prompts with the same roles."
            )
        roles = task.token_roles.renamed(self.names)
        ids = None if batch is None else roles.ids[batch.which, : batch.clean.shape[1]]
        return GateRoles(self.names, self.sees | roles.sees(), ids)

    def of_positions(self, tokens: Int[Tensor, "prompt position"]) -> Int[Tensor, "prompt position"]:
        """The role of every position of the batch that these tokens, clean or corrupt, belong to."""
        if self.ids is None or self.ids.shape != tokens.shape:
            raise GatelensError(
                "the roles of these tokens are not known: gates on edges by role act on a batch of a task, as "
                "`level.on(task, batch)`."
            )
        return self.ids
