"""How long work will take on this machine, from one timed forward pass of the model."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch

from gatelens.gates.responses import score_responses
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import ResponseTask

_TIMED = 8  # examples


@dataclass(frozen=True)
class Cost:
    """What a job that fits gates will take.

    Arguments:
        forwards: forward passes of one example; a forward and backward pass counts as two.
        seconds: time on this machine if it does nothing else.
    """

    forwards: float
    seconds: float

    def __str__(self) -> str:
        return f"about {self.forwards:,.0f} forward passes of one example, {duration(self.seconds)} on this machine"


def seconds_per_example(model: Model, task: ResponseTask, context: Context | None = None) -> float:
    """The time of one forward pass of one example, timed on a few examples of all lengths."""
    by_length = sorted(task.examples, key=len)
    few = replace(task, examples=by_length[:: -(-len(task) // _TIMED)])
    gates = torch.full((1, model.n_layers, model.n_heads), 0.5)
    times = []
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        score_responses(model, few, gates, batch=_TIMED, context=context)
        times.append(time.perf_counter() - start)
    return min(times) / len(few)


def duration(seconds: float | None) -> str:
    """A time in the largest unit that suits it; "-" if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
