"""Learn head gates: gate logits moved by Adam down a loss, many fits as rows of one batch, in pieces that are kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from gatelens.gates.responses import response_log_probs, token_counts
from gatelens.journal import Journal
from gatelens.model import Model
from gatelens.tasks.base import ResponseBatch, ResponseTask

Loss = Callable[[int, Tensor], Tensor]
"""Called as loss(number of the batch, gates (row, layer, head)); gives one number for each row."""

_SEGMENT = 25  # updates in one piece of work


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn."""

    updates: int
    rate: tuple[float, float]  # learning rate, start and end, linear between
    accumulate: int = 1  # batches for each update
    clamp: float = 4.0  # gate logits beyond this are not rewarded further


def fit_gates(
    start: Tensor,
    loss: Loss,
    rows_at_once: Callable[[int], int],
    schedule: Schedule,
    penalties: Tensor,
    journal: Journal,
    name: str,
) -> tuple[Tensor, Tensor]:
    """Gate logits (row, layer, head) after all updates from ``start``, and losses (update, row).

    What is minimised is ``loss - penalty * mean of the gate logits, clamped`` for each row; penalties: (row,).
    rows_at_once: how many rows of the batch of this number fit into memory.
    """
    segments = [range(at, min(at + _SEGMENT, schedule.updates)) for at in range(0, schedule.updates, _SEGMENT)]
    journal.begin(f"fit {name}", len(segments))
    state = torch.stack([start, torch.zeros_like(start), torch.zeros_like(start)])  # logits, Adam's two moments
    losses: list[Tensor] = []
    for number, segment in enumerate(segments):
        compute = partial(_run_segment, state, segment, loss, rows_at_once, schedule, penalties)
        packed = journal.piece(f"{name.replace(' ', '-')}-{number}", compute)
        state = packed[: state.numel()].view_as(state)
        losses.append(packed[state.numel() :].view(len(segment), len(start)))
    return state[0], torch.cat(losses)


def _run_segment(
    state: Tensor,
    segment: range,
    loss: Loss,
    rows_at_once: Callable[[int], int],
    schedule: Schedule,
    penalties: Tensor,
) -> Tensor:
    logits = state[0].clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=schedule.rate[0])
    if segment.start:
        moments = {"exp_avg": state[1].clone(), "exp_avg_sq": state[2].clone()}
        optimizer.state[logits] = {"step": torch.tensor(float(segment.start)), **moments}
    losses = torch.zeros(len(segment), len(logits))
    for row, update in enumerate(segment):
        first, last = schedule.rate
        for group in optimizer.param_groups:
            group["lr"] = first + (last - first) * update / max(1, schedule.updates - 1)
        optimizer.zero_grad()
        for part in range(schedule.accumulate):
            number = update * schedule.accumulate + part
            for rows in torch.arange(len(logits)).split(rows_at_once(number)):
                value = loss(number, logits[rows].sigmoid()) / schedule.accumulate
                value.sum().backward()
                losses[row, rows] += value.detach().cpu().float()
        reward = logits.clamp(-schedule.clamp, schedule.clamp).mean((1, 2))
        (-penalties * reward).sum().backward()
        optimizer.step()
    adam = optimizer.state[logits]
    return torch.cat([part.flatten() for part in (logits.detach(), adam["exp_avg"], adam["exp_avg_sq"], losses)])


def uniform_logits(model: Model, seed: int) -> Tensor:
    """Gate logits of gates drawn uniformly from 0..1: (layer, head)."""
    gates = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
    return gates.clamp(1e-6, 1 - 1e-6).logit()


def draw_batch(task: ResponseTask, size: int, number: int, seed: int) -> ResponseBatch:
    """The batch of this number: examples in a random order, and in another one each time that all were read.

    Every batch has `size` examples, so that none weighs more than another; all of them if there are fewer.
    """
    size = min(size, len(task))
    places = (divmod(place, len(task)) for place in range(number * size, (number + 1) * size))
    return task.batch([int(_shuffled(len(task), seed, epoch)[place]) for epoch, place in places])


@lru_cache(maxsize=8)
def _shuffled(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))


def mean_nll(model: Model, batch: ResponseBatch, gates: Tensor, autocast: bool = False) -> Tensor:
    """Mean over examples of the mean NLL of their target tokens, under each row of gates: (row,).

    autocast: run the model's matrix products in bfloat16; log-probabilities are float32 all the same.
    """
    with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast):
        sums = response_log_probs(model, batch, gates, memory_gb=None)
    return -(sums / token_counts(batch).to(sums)).mean(1)
