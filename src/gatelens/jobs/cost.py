"""What a job will take, before it starts: forward passes, and time on this machine from one timed forward pass."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from gatelens.gates.responses import score_responses
from gatelens.methods.registry import FORWARD_BACKWARD
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.sparse.sparsify import SparsifySettings
from gatelens.tasks.base import ResponseTask

_TIMED = 8  # examples


@dataclass(frozen=True)
class Cost:
    """What a job will take.

    Arguments:
        forwards: forward passes of one item; a forward and backward pass counts as two.
        seconds: time on this machine if it does nothing else.
        item: what a forward pass reads: an example, a prompt or a batch.
    """

    forwards: float
    seconds: float
    item: str = "example"

    def __str__(self) -> str:
        return f"about {self.forwards:,.0f} forward passes of one {self.item}, {duration(self.seconds)} on this machine"


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


def seconds_per_forward(model: Model, tokens: Int[Tensor, "prompt position"]) -> float:
    """The time of one forward pass of these prompts together."""
    times = []
    for _ in range(2):  # the first one warms up
        start = time.perf_counter()
        with torch.no_grad():
            model.hf(tokens.to(model.device))
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def sparsify_cost(model: Model, settings: SparsifySettings, steps_done: int = 0) -> Cost:
    """What the remaining steps of sparse post-training will take. Cost: 2 forwards of one batch.

    Arguments:
        steps_done: steps that a run has made before it was stopped.
    """
    tokens = torch.zeros(settings.batch, settings.length, dtype=torch.long)
    batches = (settings.steps - steps_done) * settings.accumulate
    forwards = (1 + FORWARD_BACKWARD) * batches  # of the dense model, and of the sparse one with its backward pass
    return Cost(forwards, forwards * seconds_per_forward(model, tokens), "batch")


def duration(seconds: float | None) -> str:
    """A time in the largest unit that suits it; "-" if it is not known."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
