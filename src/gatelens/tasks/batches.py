"""Prompts, in batches that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.tasks.base import Bucket, CircuitTask, Example, ResponseTask


def batches(task: CircuitTask, numbers_per_prompt: Callable[[int], int], memory_gb: float) -> list[Bucket]:
    """The task's buckets, cut into batches that fit into the memory budget, in order.

    numbers_per_prompt: how many float32 numbers the work holds for one prompt of a given length.
    """
    if not isinstance(task, CircuitTask):
        raise GatelensError(
            f"the task {task.name} has target responses, not clean and corrupt prompts: circuits need a circuit task."
        )
    return list(_batches(task, numbers_per_prompt, memory_gb))


def _batches(task: CircuitTask, numbers_per_prompt: Callable[[int], int], memory_gb: float) -> Iterator[Bucket]:
    for bucket in task.buckets:
        size = max(1, int(memory_gb * 1e9 // (4 * numbers_per_prompt(bucket.clean.shape[1]))))
        for start in range(0, len(bucket), size):
            cut = slice(start, start + size)
            yield Bucket(bucket.clean[cut], bucket.corrupt[cut], bucket.which[cut])


def join(task: CircuitTask, parts: Sequence[Tensor]) -> list[Tensor]:
    """What was computed batch by batch (prompt first), as one tensor for each bucket again."""
    joined: list[Tensor] = []
    rest = list(parts)
    for bucket in task.buckets:
        mine: list[Tensor] = []
        while sum(map(len, mine)) < len(bucket):
            mine.append(rest.pop(0))
        joined.append(torch.cat(mine))
    return joined


def take(task: CircuitTask, n: int) -> CircuitTask:
    """The task with its first n prompts only."""
    mine = [(bucket, bucket.which < n) for bucket in task.buckets]
    buckets = [Bucket(bucket.clean[m], bucket.corrupt[m], bucket.which[m]) for bucket, m in mine if m.any()]
    return replace(
        task, pairs=task.pairs[:n], buckets=buckets, answer_ids=task.answer_ids[:n], wrong_ids=task.wrong_ids[:n]
    )


def split(task: ResponseTask, n: int) -> tuple[ResponseTask, ResponseTask]:
    """n of the examples, drawn by the task's seed, and all others: the end of a file may be unlike its start."""
    drawn = set(torch.randperm(len(task), generator=torch.Generator().manual_seed(task.seed))[:n].tolist())
    sides: tuple[list[Example], list[Example]] = ([], [])
    for i, example in enumerate(task.examples):
        sides[i not in drawn].append(example)
    return replace(task, examples=sides[0]), replace(task, examples=sides[1])


def as_responses(task: CircuitTask | ResponseTask) -> ResponseTask:
    """A circuit task as prompts with target responses: each clean prompt with its answer, or any of its answers."""
    if isinstance(task, ResponseTask):
        return task
    if not isinstance(task, CircuitTask):
        raise GatelensError(f"{task!r} is no task: make one with gatelens.task(name, model).")
    examples: dict[int, Example] = {}
    for bucket in task.buckets:
        for which, tokens in zip(bucket.which.tolist(), bucket.clean.tolist(), strict=True):
            pair = task.pairs[which]
            answer, *also = dict.fromkeys(int(answer) for answer in task.answer_ids[which] if answer >= 0)
            examples[which] = Example(pair.clean, pair.answers[0], tuple(tokens), (answer,), tuple(also))
    return ResponseTask(task.name, task.seed, [examples[i] for i in range(len(task))], options=task.options)
