"""The plan of a fit of head gates: its settings, objective, schedule, start and batches.

``gates/fitting.py`` makes the updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.runtime.settings import ADDED, Settings
from gatelens.tasks.base import ResponseBatch, ResponseTask


class FitSettings(Settings):
    """The settings that all methods that fit gates share."""

    common: ClassVar[tuple[str, ...] | None] = (
        "seeds", "updates", "batch", "n", "held_out", "most", "every", "shots", "memory_gb"
    )  # fmt: skip

    seeds: int = Field(3, ge=1, le=1_000, description="fits from different uniform starts, as rows of one batch")
    updates: int = Field(40, ge=1, le=10_000_000, description="updates of each fit")
    batch: int = Field(8, ge=1, le=100_000, description="examples in a batch")
    accumulate: int = Field(1, ge=1, le=100_000, description="batches for each update")
    seed: int = Field(0, ge=0, lt=2**32, description="the first seed; it also decides the order of the examples")
    paired: bool = Field(
        True,
        description="all seeds are fitted on the same batches; otherwise each seed has its own order of examples",
        json_schema_extra=ADDED,
    )
    clip: float | None = Field(
        None,
        gt=0,
        description="clip the gradient of all gate logits of a fit at this norm; the authors' code has 1",
        json_schema_extra=ADDED,
    )
    patience: int = Field(
        0,
        ge=0,
        description="end a fit when no gate has moved by more than 0.01 for this many updates; 0: never",
        json_schema_extra=ADDED,
    )
    autocast: bool = Field(
        False, description="run matrix products in bfloat16 (autocast): about twice as fast where the processor can"
    )

    def orders(self, seeds: Sequence[int]) -> list[int]:
        """For each fit, the seed of the order in which it sees the examples.

        Arguments:
            seeds: the number of each fit, from 0 on.
        """
        return [self.seed if self.paired else self.seed + seed for seed in seeds]


def check_rates(rates: tuple[float, float]) -> tuple[float, float]:
    """Raise an error if a learning rate is not above 0, otherwise return both. A validator of settings fields."""
    if min(rates) <= 0:
        raise GatelensError(f"the learning rates {rates[0]:g} and {rates[1]:g} must both be above 0.")
    return rates


Loss = Callable[[Float[Tensor, "row layer head"]], Float[Tensor, " row"]]
"""Called with gates; returns what some examples of a batch add to the loss of each row."""


class Work(NamedTuple):
    """The loss of a batch in parts that fit into memory.

    Arguments:
        rows_at_once: how many rows run together.
        losses: one for each part of the batch. Their sum is the loss of the batch.
    """

    rows_at_once: int
    losses: Sequence[Loss]


@dataclass(frozen=True)
class Objective:
    """What a fit minimises for each row: ``loss - penalty * mean of the gate logits, clamped``.

    Arguments:
        work: called as work(number, order, rows): the loss of the batch with this number, in this order of the
            examples, cut so that this many rows fit into memory.
        orders: for each row, the seed of its order of the examples. Rows with the same order run together.
        penalties: above 0, open gates are rewarded; below 0, closed ones.
        clamp: gate logits beyond plus or minus this are not rewarded further.
    """

    work: Callable[[int, int, int], Work]
    orders: Sequence[int]
    penalties: Float[Tensor, " row"]
    clamp: float = 4.0

    def of_rows(self, rows: Sequence[int]) -> Objective:
        """The same objective for some of the rows."""
        return Objective(self.work, [self.orders[row] for row in rows], self.penalties[list(rows)], self.clamp)


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to learn.

    Arguments:
        rates: the learning rates of the first and of the last update; linear between them.
        accumulate: batches for each update.
        clip: the largest norm of the gradient of a row, including the penalty; None: any.
        patience: a row ends when none of its gates has moved by more than 0.01 for this many updates; 0: never.
    """

    updates: int
    rates: tuple[float, float]
    accumulate: int = 1
    clip: float | None = None
    patience: int = 0

    @classmethod
    def of(cls, settings: FitSettings, rates: tuple[float, float]) -> Schedule:
        """The schedule that the settings ask for, at these learning rates."""
        return cls(settings.updates, rates, settings.accumulate, settings.clip, settings.patience)

    def rate(self, update: int) -> float:
        """The learning rate of an update."""
        first, last = self.rates
        return first + (last - first) * update / max(1, self.updates - 1)


def uniform_start(model: Model, seeds: Sequence[int]) -> Float[Tensor, "row layer head"]:
    """Gate logits of gates that are drawn uniformly from 0 to 1, one row for each seed."""
    start = torch.empty(len(seeds), model.n_layers, model.n_heads)
    for row, seed in enumerate(seeds):
        gates = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
        start[row] = gates.clamp(1e-6, 1 - 1e-6).logit()
    return start


def draw_batch(task: ResponseTask, size: int, number: int, seed: int) -> ResponseBatch:
    """Draw the batch with this number.

    Examples are drawn in a random order, without replacement. When all of them have been drawn, a new random order
    begins. All batches have the same size, so that no example has more weight than another.

    Arguments:
        size: examples in a batch; if the task has fewer, a batch has all of them.
        number: the number of the batch, from 0 on.
        seed: decides the random orders.
    """
    size = min(size, len(task))
    drawn = (divmod(position, len(task)) for position in range(number * size, (number + 1) * size))
    return task.batch([int(_shuffled(len(task), seed, epoch)[position]) for epoch, position in drawn])


@lru_cache(maxsize=8)
def _shuffled(n: int, seed: int, epoch: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed * 1_000_003 + epoch))
