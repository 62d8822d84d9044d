"""Learn head gates: Adam minimises a loss over gate logits. Many fits are rows of one batch; a killed fit resumes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.fit_plan import Objective, Schedule
from gatelens.runtime.context import Context
from gatelens.runtime.interrupts import finishing_steps
from gatelens.runtime.journal import StateSaver

STILL = 0.01
"""A gate that has moved by no more than this counts as still (`FitSettings.patience`)."""


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
        saver = StateSaver(journal, f"{names.file}.{names.process}", first)
        states = _updates(fits.state[rows, :3], range(first, until), objective.of_rows(rows), schedule)
        with finishing_steps() as stop:
            for done, (state, losses) in enumerate(states, first + 1):
                fits.advance(rows, state, losses)
                some_ended = not {*rows} <= {*fits.unfinished}
                saver.step(done, partial(fits.packed, names.rows), at_once=some_ended or stop.received)
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
