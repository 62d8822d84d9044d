"""Learn head gates: Adam minimises a loss over gate logits. Many fits are rows of one batch; a killed fit resumes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.interrupts import finishing_steps
from gatelens.runtime.settings import ADDED, Settings
from gatelens.tasks.base import ResponseBatch, ResponseTask

# The state of a fit is saved after this many updates or seconds, whichever comes first.
_UPDATES, _SECONDS = 25, 15.0
STILL = 0.01
"""A gate that has moved by no more than this counts as still (`FitSettings.patience`)."""


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


@dataclass(frozen=True)
class FitNames:
    """The names under which a fit reports progress and saves its state.

    Arguments:
        title: the name of the phase, such as "G+ and G-".
        rows: one name for each row. The name does not depend on which process fits the row.
        process: the name of this process (`Processes.name`). It saves all its rows in one file.
    """

    title: str
    rows: Sequence[str]
    process: str

    @property
    def file(self) -> str:
        """The start of the file names of this fit."""
        return self.title.replace(" ", "-")


def fit_gates(
    start: Float[Tensor, "row layer head"],
    objective: Objective,
    schedule: Schedule,
    names: FitNames,
    context: Context,
) -> tuple[Float[Tensor, "row layer head"], Float[Tensor, "update row"]]:
    """Fit all rows of gate logits from their starts.

    A fit resumes from the saved states, including those of other processes. Rows that are behind the others catch up
    first.

    Arguments:
        start: the gate logits to start from.
        objective: what each row minimises.
        schedule: how many updates to make, and at which learning rates.
        names: the names for progress and for saved states.
        context: where states are saved.

    Returns:
        The gate logits after the last update, and the loss of every update (without the penalty). Losses of updates
        that were not made, because no gate of a row moved any more, are nan.
    """
    journal, last = context.journal, schedule.updates
    fits = _Fits(start, schedule)
    for tensors in journal.kept(f"{names.file}."):
        fits.resume(tensors, names.rows)
    journal.begin(f"fit {names.title}", last)
    journal.reach(fits.slowest)
    while fits.slowest < last:
        first = fits.slowest
        rows = [row for row in fits.unfinished if fits.done[row] == first]
        until = min((fits.done[row] for row in fits.unfinished if fits.done[row] > first), default=last)
        saved_after, saved_at = first, time.monotonic()
        states = _updates(fits.state[rows, :3], range(first, until), objective.of_rows(rows), schedule)
        with finishing_steps() as stop:
            for done, (state, losses) in enumerate(states, first + 1):
                fits.advance(rows, state, losses)
                some_ended = not {*rows} <= {*fits.unfinished}
                due = done - saved_after >= _UPDATES or time.monotonic() - saved_at >= _SECONDS
                if some_ended or due or stop.received:
                    journal.keep(f"{names.file}.{names.process}", fits.packed(names.rows))
                    saved_after, saved_at = done, time.monotonic()
                journal.reach(fits.slowest if some_ended else done)
                if stop.received:
                    raise KeyboardInterrupt
                if some_ended:
                    break
    return fits.state[:, 0], fits.losses


class _Fits:
    """The progress of each row: its gate logits with Adam's two moments, where its gates stood still, and its losses.

    Arguments:
        start: the gate logits to start from.
        schedule: how many updates there are, and when a row ends before them.
    """

    def __init__(self, start: Float[Tensor, "row layer head"], schedule: Schedule) -> None:
        zeros = torch.zeros_like(start)
        # The last part has the gates since when the row is still: none of them has moved by more than STILL since.
        self.state = torch.stack([start, zeros, zeros, start.sigmoid()], 1)
        self.losses = torch.full((schedule.updates, len(start)), float("nan"))
        self.done, self.still = [0] * len(start), [0] * len(start)
        self.patience = schedule.patience

    @property
    def unfinished(self) -> list[int]:
        """The rows that need more updates."""
        return [row for row, done in enumerate(self.done) if done < len(self.losses) and not self._is_still(row)]

    @property
    def slowest(self) -> int:
        """How many updates every unfinished row has had; all updates if there is no such row."""
        return min((self.done[row] for row in self.unfinished), default=len(self.losses))

    def advance(self, rows: list[int], state: Tensor, losses: Tensor) -> None:
        """Record the next update of these rows, which all have had the same number of updates.

        Arguments:
            state: (row, 3, layer, head), the gate logits and Adam's moments.
        """
        self.state[rows, :3], self.losses[self.done[rows[0]], rows] = state, losses
        for row in rows:
            self.done[row] += 1
            gates = self.state[row, 0].sigmoid()
            if (gates - self.state[row, 3]).abs().max() > STILL:
                self.state[row, 3], self.still[row] = gates, 0
            else:
                self.still[row] += 1

    def packed(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Each row as one vector: its state, how long it is still, its losses. The length says how many updates."""
        still = self.state.new_tensor(self.still)[:, None]
        return {
            name: torch.cat([self.state[row].flatten(), still[row], self.losses[: self.done[row], row]])
            for row, name in enumerate(names)
        }

    def resume(self, tensors: Mapping[str, Tensor], names: Sequence[str]) -> None:
        """Continue rows from packed vectors that have more updates. Vectors of another size or dtype are ignored."""
        size, updates = self.state[:1].numel(), len(self.losses)
        for row, name in enumerate(names):
            packed = tensors.get(name)
            if packed is None or packed.dtype != self.state.dtype or packed.ndim != 1:
                continue
            done = len(packed) - size - 1
            if self.done[row] < done <= updates:
                self.state[row] = packed[:size].view_as(self.state[row])
                self.still[row] = int(packed[size])
                self.losses[:done, row] = packed[size + 1 :]
                self.done[row] = done

    def _is_still(self, row: int) -> bool:
        return 0 < self.patience <= self.still[row]


def _updates(
    state: Float[Tensor, "row moment layer head"], numbers: range, objective: Objective, schedule: Schedule
) -> Iterator[tuple[Float[Tensor, "row moment layer head"], Float[Tensor, " row"]]]:
    """Make the updates with these numbers. Yield the state and the losses after each update."""
    logits, first_moment, second_moment = (part.clone() for part in state.unbind(1))
    logits.requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=schedule.rates[0])
    step = torch.tensor(float(numbers.start))
    optimizer.state[logits] = {"step": step, "exp_avg": first_moment, "exp_avg_sq": second_moment}
    for update in numbers:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(update)
        losses, gradient = loss_and_gradient(logits, update, objective, schedule.accumulate)
        reward = logits.clamp(-objective.clamp, objective.clamp).mean((1, 2))
        gradient += torch.autograd.grad((-objective.penalties * reward).sum(), logits)[0]
        logits.grad = gradient if schedule.clip is None else _clipped(gradient, schedule.clip)
        optimizer.step()
        yield torch.stack([logits.detach(), first_moment, second_moment], 1), losses


def _clipped(gradient: Float[Tensor, "row layer head"], most: float) -> Float[Tensor, "row layer head"]:
    """The gradient with the norm of each row reduced to this, if it is larger. Each row is a fit of its own."""
    norms = gradient.flatten(1).norm(dim=1)
    return gradient * (most / (norms + 1e-6)).clamp(max=1)[:, None, None]


def loss_and_gradient(
    logits: Float[Tensor, "row layer head"], update: int, objective: Objective, accumulate: int = 1
) -> tuple[Float[Tensor, " row"], Float[Tensor, "row layer head"]]:
    """The mean loss over the batches of an update, and its gradient. As much runs at once as fits into memory.

    Arguments:
        logits: the gate logits; they require gradients.
        update: the number of the update.
        accumulate: batches of an update.
    """
    losses = torch.zeros(len(logits))
    gradient = torch.zeros_like(logits)
    for number in range(update * accumulate, (update + 1) * accumulate):
        for order in dict.fromkeys(objective.orders):
            same_order = torch.tensor([row for row, own in enumerate(objective.orders) if own == order])
            work = objective.work(number, order, len(same_order))
            for rows, loss_of in itertools.product(same_order.split(work.rows_at_once), work.losses):
                loss = loss_of(logits[rows].sigmoid()) / accumulate
                # grad() and not backward(), which would also leave gradients on weights that require them.
                gradient += torch.autograd.grad(loss.sum(), logits)[0]
                losses[rows] += loss.detach().cpu().float()
    if not losses.isfinite().all():
        raise GatelensError(
            f"the loss of update {update} is not a finite number because the model's logits are not: load the model in "
            "a wider dtype, or check that its weights are complete."
        )
    return losses, gradient


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
