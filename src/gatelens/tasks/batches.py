"""Prompts in batches that fit into memory, and parts of tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask, Example, ResponseTask


def batches(task: CircuitTask, numbers_per_prompt: Callable[[int], int], context: Context) -> list[Bucket]:
    """The task's buckets in order, cut into batches that fit into the memory budget.

    Arguments:
        numbers_per_prompt: how many float32 numbers the work holds for one prompt of a given length.
    """
    if not isinstance(task, CircuitTask):
        raise GatelensError(
            f"the task {task.name} has no corrupt prompts: give a circuit task, which `gatelens tasks` lists."
        )
    parts: list[Bucket] = []
    for bucket in task.buckets:
        size = context.fits(numbers_per_prompt(bucket.clean.shape[1]))
        for start in range(0, len(bucket), size):
            part = slice(start, start + size)
            parts.append(Bucket(bucket.clean[part], bucket.corrupt[part], bucket.which[part]))
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
    masks = [(bucket, bucket.which < n) for bucket in task.buckets]
    buckets = [
        Bucket(bucket.clean[mask], bucket.corrupt[mask], bucket.which[mask]) for bucket, mask in masks if mask.any()
    ]
    roles = replace(task.token_roles, ids=task.token_roles.ids[:n])
    return replace(
        task,
        pairs=task.pairs[:n],
        buckets=buckets,
        answer_ids=task.answer_ids[:n],
        wrong_ids=task.wrong_ids[:n],
        token_roles=roles,
    )


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
