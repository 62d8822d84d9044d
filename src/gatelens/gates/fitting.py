"""Learn head gates: gate logits moved by Adam down a loss, many fits as rows of one batch, each of them kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.responses import parts_at_once, response_log_probs, token_counts
from gatelens.model import Model
from gatelens.runtime.journal import Journal
from gatelens.tasks.base import ResponseBatch, ResponseTask

Loss = Callable[[int, Tensor], Tensor]
"""Called as loss(number of the batch, gates (row, layer, head)); gives one number for each row."""

# The state of a fit is kept after so many updates or so many seconds, whichever comes first.
_UPDATES, _SECONDS = 25, 15.0
_SHORT = 256  # tokens


@dataclass(frozen=True)
class FitSettings:
    """What every way of fitting gates is told."""

    seeds: int = field(default=10, metadata={"help": "fits from different uniform starts, as rows of one batch"})
    updates: int = field(default=500, metadata={"help": "updates of each fit"})
    batch: int = field(default=16, metadata={"help": "examples in a batch"})
    accumulate: int = field(default=1, metadata={"help": "batches for each update"})
    seed: int = field(default=0, metadata={"help": "the first seed; also of the order of the data"})
    autocast: bool = field(
        default=False, metadata={"help": "matrix products in bfloat16 (autocast): about twice as fast on CUDA"}
    )
    memory_gb: float = field(default=4.0, metadata={"help": "memory for runs, in GB, besides the model itself"})

    def __post_init__(self) -> None:
        for name in ("seeds", "updates", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise GatelensError(f"{name} is at least 1, not {getattr(self, name)}.")
        if not 0 <= self.seed < 2**32:
            raise GatelensError(f"seed is a whole number from 0 to {2**32 - 1}, not {self.seed}.")
        if not self.memory_gb > 0:
            raise GatelensError(f"memory_gb is above 0, not {self.memory_gb}.")


def check_rates(*rates: float) -> None:
    """Refuse learning rates that are none."""
    if not all(0 < rate < math.inf for rate in rates):
        raise GatelensError("learning rates are above 0.")


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
    what: str,
    names: Sequence[str],
    share: str,
) -> tuple[Tensor, Tensor]:
    """Gate logits (row, layer, head) after all updates from ``start``, and losses (update, row).

    What is minimised is ``loss - penalty * mean of the gate logits, clamped`` for each row; penalties: (row,).
    rows_at_once: how many rows of the batch of this number fit into memory.
    names: one for each row. share: names this process's rows among those of all; their states are kept together. Rows
    that other processes kept are taken up too, and those that are behind catch up first.
    """
    state = torch.stack([start, torch.zeros_like(start), torch.zeros_like(start)], 1)  # logits, Adam's two moments
    losses = torch.zeros(schedule.updates, len(start))
    done = [0] * len(start)
    file = what.replace(" ", "-")
    for kept in journal.kept(f"{file}."):
        for row, name in enumerate(names):
            if (found := _unpack(kept.get(name), state[row], schedule.updates)) and len(found[1]) > done[row]:
                state[row], past = found
                done[row] = len(past)
                losses[: len(past), row] = past
    journal.begin(f"fit {what}", schedule.updates)
    journal.reach(min(done, default=schedule.updates))
    while (at := min(done, default=schedule.updates)) < schedule.updates:
        rows = [row for row, n in enumerate(done) if n == at]
        until = min((n for n in done if n > at), default=schedule.updates)
        kept_at, clock = at, time.monotonic()
        moves = _updates(state[rows], range(at, until), loss, rows_at_once, schedule, penalties[rows])
        for reached, (moved, measured) in enumerate(moves, at + 1):
            state[rows], losses[reached - 1, rows] = moved, measured
            for row in rows:
                done[row] = reached
            if reached == until or reached - kept_at >= _UPDATES or time.monotonic() - clock >= _SECONDS:
                packed = [_pack(state[row], losses[: done[row], row]) for row in range(len(done))]
                journal.keep(f"{file}.{share}", dict(zip(names, packed, strict=True)))
                kept_at, clock = reached, time.monotonic()
            journal.reach(reached)
    return state[:, 0], losses


def _updates(
    state: Tensor,
    numbers: range,
    loss: Loss,
    rows_at_once: Callable[[int], int],
    schedule: Schedule,
    penalties: Tensor,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows of a state, moved by the updates of these numbers: after each of them the state and the losses (row,)."""
    logits, first_moment, second_moment = (part.clone() for part in state.unbind(1))
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=schedule.rate[0])
    step = torch.tensor(float(numbers.start))
    optimizer.state[logits] = {"step": step, "exp_avg": first_moment, "exp_avg_sq": second_moment}
    first, last = schedule.rate
    for update in numbers:
        for group in optimizer.param_groups:
            group["lr"] = first + (last - first) * update / max(1, schedule.updates - 1)
        losses = torch.zeros(len(logits))
        gradient = torch.zeros_like(logits)
        for number in range(update * schedule.accumulate, (update + 1) * schedule.accumulate):
            for rows in torch.arange(len(logits)).split(rows_at_once(number)):
                value = loss(number, logits[rows].sigmoid()) / schedule.accumulate
                # Of the gates only: backward() would leave gradients on a model whose weights ask for them.
                gradient += torch.autograd.grad(value.sum(), logits)[0]
                losses[rows] += value.detach().cpu().float()
        if not losses.isfinite().all():
            raise GatelensError(
                f"the loss of update {update} is not a finite number, so the model's logits are not: load it in a "
                "wider dtype, or see whether its weights are whole."
            )
        reward = logits.clamp(-schedule.clamp, schedule.clamp).mean((1, 2))
        gradient += torch.autograd.grad((-penalties * reward).sum(), logits)[0]
        logits.grad = gradient
        optimizer.step()
        yield torch.stack([logits.detach(), first_moment, second_moment], 1), losses


def _pack(state: Tensor, losses: Tensor) -> Tensor:
    """One row's state and its losses so far as one vector, whose length says how many updates it is after."""
    return torch.cat([state.flatten(), losses])


def _unpack(kept: Tensor | None, like: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    size = like.numel()
    if kept is None or kept.dtype != like.dtype or kept.ndim != 1 or not size <= len(kept) <= size + most:
        return None
    return kept[:size].view_as(like), kept[size:]


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
    """Mean over examples of the mean NLL of their target tokens, under each row of gates: (row,)."""
    return nll(model, batch, gates, autocast).mean(1)


def nll(model: Model, batch: ResponseBatch, gates: Tensor, autocast: bool = False) -> Tensor:
    """Mean NLL of each example's target tokens, under each row of gates: (row, example), the examples in any order.

    autocast: run the model's matrix products in bfloat16; log-probabilities are float32 all the same.
    """
    means: list[Tensor] = []  # (row, example) of each part
    for part in parts_at_once(model, batch, len(gates)):
        with torch.autocast(model.device.type, torch.bfloat16, enabled=autocast), _attention_for(model, part):
            sums = response_log_probs(model, part, gates, memory_gb=None)
        means.append(sums / token_counts(part).to(sums))
    return -torch.cat(means, 1)


@contextmanager
def _attention_for(model: Model, batch: ResponseBatch) -> Iterator[None]:
    """On a CPU, short sequences go through the plain attention: the gradient of torch's fused one takes longer there.

    By a quarter of a whole update of SmolLM2 at 50 tokens, and at 100; past 256 the plain one's memory counts. Not for
    float64: the plain one computes in float32, where a float64 mask is infinite.
    """
    config = model.hf.config
    own = config._attn_implementation
    short = batch.tokens.shape[1] <= _SHORT and model.dtype != torch.float64
    if own == "sdpa" and model.device.type == "cpu" and short:
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = own
