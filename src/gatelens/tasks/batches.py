"""Prompts in batches that fit into memory, and parts of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask, Example, ResponseTask


def check_circuit_task(task: CircuitTask | ResponseTask) -> None:
    """Raise an error if a task has no corrupt prompts."""
    if not isinstance(task, CircuitTask):
        raise GatelensError(
            f"the task {task.name} has no corrupt prompts: give a circuit task, which `gatelens tasks` lists."
        )


def batches(task: CircuitTask, numbers_per_prompt: Callable[[int], int], context: Context) -> list[Bucket]:
    """The task's buckets in order, cut into batches that fit into the memory budget, at least one for each process.

    Arguments:
        numbers_per_prompt: how many float32 numbers the work holds for one prompt of a given length.
    """
    check_circuit_task(task)
    parts: list[Bucket] = []
    for bucket in task.buckets:
        share = -(-len(bucket) // context.n_processes)
        parts += bucket.parts(min(share, context.fits(numbers_per_prompt(bucket.clean.shape[1]))))
    return parts


def join(task: CircuitTask, parts: Sequence[Iterable[Tensor]]) -> list[Tensor]:
    """Join the results of the batches into one tensor for each bucket.

    Arguments:
        parts: the result of each batch, with the prompts on the first axis, in the order of `batches`.
    """
    prompts = [prompt for part in parts for prompt in part]
    buckets: list[Tensor] = []
    for bucket in task.buckets:
        buckets.append(torch.stack(prompts[: len(bucket)]))
        del prompts[: len(bucket)]
    return buckets


def take(task: CircuitTask, n: int) -> CircuitTask:
    """The task with its first n prompts only."""
    return select(task, range(min(n, len(task))))


def select(task: CircuitTask, prompts: Sequence[int]) -> CircuitTask:
    """The task with some of its prompts only, in this order.

    Arguments:
        prompts: the numbers of the prompts in the task's `pairs`, each at most once.
    """
    place = torch.full((len(task),), -1)
    place[list(prompts)] = torch.arange(len(prompts))
    buckets: list[Bucket] = []
    for bucket in task.buckets:
        which, order = place[bucket.which].sort()
        order, which = order[which >= 0], which[which >= 0]
        if len(which):
            buckets.append(Bucket(bucket.clean[order], bucket.corrupt[order], which))
    numbers = torch.tensor(list(prompts), dtype=torch.int64)
    return replace(
        task,
        pairs=[task.pairs[number] for number in prompts],
        buckets=buckets,
        answer_ids=task.answer_ids[numbers],
        wrong_ids=task.wrong_ids[numbers],
        token_roles=replace(task.token_roles, ids=task.token_roles.ids[numbers]),
    )


def halves(task: CircuitTask) -> tuple[CircuitTask, CircuitTask]:
    """Two halves of a task's prompts, drawn at random. The task's seed decides which."""
    return hold_out(task, len(task) - len(task) // 2)


def hold_out(task: CircuitTask, n: int) -> tuple[CircuitTask, CircuitTask]:
    """All but n prompts of a task, and these n prompts, which are drawn at random. The task's seed decides which."""
    order = torch.randperm(len(task), generator=torch.Generator().manual_seed(task.seed)).tolist()
    rest = len(task) - n
    return select(task, sorted(order[:rest])), select(task, sorted(order[rest:]))


def template_halves(task: CircuitTask) -> tuple[CircuitTask, CircuitTask] | None:
    """Two parts of a task's prompts that share no template, each with about half of the templates.

    Returns:
        None if all prompts have the same template, or if the task does not know its templates.
    """
    templates = sorted({pair.template for pair in task.pairs})
    if len(templates) < 2:
        return None
    order = torch.randperm(len(templates), generator=torch.Generator().manual_seed(task.seed)).tolist()
    first = {templates[number] for number in order[: len(templates) // 2]}
    sides = [[i for i, pair in enumerate(task.pairs) if (pair.template in first) is side] for side in (True, False)]
    return select(task, sides[0]), select(task, sides[1])


def split(task: ResponseTask, n: int) -> tuple[ResponseTask, ResponseTask]:
    """Split a task into n examples and all others. The task's seed decides which.

    The n examples are drawn at random, because the examples at the start of a file may differ from those at its end.
    """
    drawn = set(torch.randperm(len(task), generator=torch.Generator().manual_seed(task.seed))[:n].tolist())
    sides: tuple[list[Example], list[Example]] = ([], [])
    for i, example in enumerate(task.examples):
        sides[i not in drawn].append(example)
    return replace(task, examples=sides[0]), replace(task, examples=sides[1])


def as_responses(task: CircuitTask | ResponseTask) -> ResponseTask:
    """Turn a circuit task into a response task: each clean prompt, with its answers as the right responses."""
    if isinstance(task, ResponseTask):
        return task
    if not isinstance(task, CircuitTask):
        raise GatelensError(f"{task!r} is not a task: make one with gatelens.task(name, model).")
    examples: dict[int, Example] = {}
    for bucket in task.buckets:
        for which, tokens in zip(bucket.which.tolist(), bucket.clean.tolist(), strict=True):
            pair = task.pairs[which]
            answer, *also = dict.fromkeys(int(answer) for answer in task.answer_ids[which] if answer >= 0)
            examples[which] = Example(pair.clean, pair.answers[0], tuple(tokens), (answer,), tuple(also))
    return ResponseTask(task.name, task.seed, [examples[i] for i in range(len(task))], options=task.options)
