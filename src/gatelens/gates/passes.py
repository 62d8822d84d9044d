"""What methods that use gradients share: passes along the path of embeddings, and the batches of a task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Change, Pass, embeddings
from gatelens.gates.hooks import Hooks
from gatelens.gates.level import Level, S
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.sparse.recording import straight_through
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches


def attribute_batches(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    scores: Callable[[Attribution], Tensor],
    method: str,
    context: Context | None = None,
    *,
    numbers: Callable[[int], int] | None = None,
) -> S:
    """The scores of a task from those of its batches. Each batch is a piece of work that a resumed run reads again.

    Prompts are summed and divided once, so scores do not depend on how prompts are split into batches.

    Arguments:
        scores: the scores of every prompt of a batch (prompt, ...), from its products with gradients.
        method: the name of the method, for the scores.
        numbers: how many numbers are held for a prompt of a given length; by default those of one pass.
    """
    context, level = context or Context(), level.on(task)
    parts = batches(task, numbers or partial(level.attribute_numbers, model), context)
    context.begin(f"score {level.noun}", len(parts))

    def piece(batch: Bucket) -> Tensor:
        attribution = level.on(task, batch).attribution(model, batch, lambda logits: task.differentiated(logits, batch))
        return attribution.piece(scores(attribution))

    pieces = context.each_piece([(f"{level.name}-{i}", partial(piece, batch)) for i, batch in enumerate(parts)])
    return level.attributed(model, task, pieces, method)


def embedding_path(model: Model, batch: Bucket, points: Sequence[float], changes: Sequence[Change] = ()) -> list[Pass]:
    """Passes at points of the straight path of input embeddings from corrupt (0) to clean (1)."""
    if list(points) == [1.0]:
        return [Pass(changes=changes)]
    clean, corrupt = (embeddings(model, tokens) for tokens in (batch.clean, batch.corrupt))
    return [Pass(stream=corrupt + point * (clean - corrupt), changes=changes) for point in points]


def gate_changes(through_gates: bool) -> list[Change]:
    """The change that lets gradients pass through the gates of a sparse model, if it is asked for."""

    def pass_through(model: Model, hooks: Hooks) -> None:
        hooks.enter_context(straight_through(model.hf))

    return [pass_through] if through_gates else []
