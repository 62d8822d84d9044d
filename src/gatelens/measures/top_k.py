"""Top-k circuits: keep the k best gates of a ranking, set everything else to its source, and measure the metric.

The circuit of no gates and the circuit of all gates are runs like any other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.level import Level, Source, top_masks
from gatelens.gates.scores import Ranking, Scores
from gatelens.gates.selection import TOP, selected
from gatelens.methods.patching import DENOISING
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.batches import batches, take

Members = Sequence[Tensor]
"""A circuit as the positions of its gates in each gate set, best first."""


@dataclass(frozen=True, eq=False)
class Circuits:
    """The circuits that keep the top k of one ranking, for one task.

    Arguments:
        orders: positions of the gates from best to worst; one order if all prompts share their gates, otherwise one for
            each prompt, in the order of the task's buckets. k is then the number of gates kept in each prompt.
        source: what gates outside a circuit read.
        fitted_on: the prompts that optimal constants are fitted on; None: those of the task.
    """

    level: Level[Any]
    model: Model
    task: CircuitTask
    orders: Sequence[Int[Tensor, " _gate"]]
    source: Source = "corrupt"
    context: Context = field(default_factory=Context)
    fitted_on: CircuitTask | None = None
    _constants: list[Any] = field(default_factory=list, repr=False)  # the value of `constants`, once it is computed

    @classmethod
    def of(
        cls,
        model: Model,
        task: CircuitTask,
        scores: Scores,
        ranking: Ranking = "absolute",
        source: Source = "corrupt",
        context: Context | None = None,
        selection: str = TOP,
        fitted_on: CircuitTask | None = None,
    ) -> Circuits:
        """The circuits of these scores, ordered by a ranking and a selection (`gatelens.gates.selection`)."""
        if scores.is_sample:
            raise GatelensError(
                "only a sample of the gates has scores: score all gates, because a circuit ranks all of them."
            )
        level = scores.level.on(task)
        level.check_source(source)
        if scores.method == DENOISING:
            warnings.warn(
                "gates ranked by denoising make poor circuits: on four tasks, smollm2 needs 180 to 240 of its 270 "
                "heads for 90 % of the effect. Rank them by noising.",
                GatelensWarning,
                stacklevel=2,
            )
        orders = selected(scores, ranking, selection)
        return cls(level, model, task, orders, source, context or Context(), fitted_on)

    @property
    def total(self) -> int:
        """The number of gates; if prompts have their own gates, of the prompt with the most."""
        return max(map(len, self.orders))

    @cached_property
    def batches(self) -> list[Bucket]:
        """The task's prompts in batches that fit into memory."""
        return self._batches_of(self.task, self.context)

    def _batches_of(self, task: CircuitTask, context: Context) -> list[Bucket]:
        return batches(task, partial(circuit_numbers, self.level, self.model), context)

    def constants(self) -> Any:
        """What closed gates read in every prompt, if the source is a mean or an optimal constant.

        They are computed once, also for other rankings of the same circuits (`shuffled`).
        """
        if not self._constants:
            if self.source == "optimal":
                # Every process fits them, on batches that do not depend on the number of processes.
                alone = self.context.alone()
                prompts = self._batches_of(self.fitted_on or self.task, alone)
                constants = self.level.optimal(self.model, prompts, alone.part("constants"))
            else:
                constants = self.level.mean(self.model, [bucket.corrupt for bucket in self.batches])
            self._constants.append(constants)
        return self._constants[0]

    def counts(self, ks: Sequence[int]) -> list[float]:
        """How many gates each circuit keeps after pruning (`Level.count`), mean over prompts."""
        counts = [[self.level.count(self.model, order, k) for order in self.orders] for k in ks]
        return [sum(by_order) / len(by_order) for by_order in counts]

    def gates(self, batch: int, ks: Sequence[int], complement: bool = False) -> Bool[Tensor, "row ..."]:
        """The gates of each circuit on one batch. The complement keeps all gates but the top k."""
        bucket = self.batches[batch]
        shape = self.level.shape(self.model, bucket.clean.shape[1])
        size = torch.Size(shape).numel()
        if self.level.shared:
            masks = top_masks(self.orders[0], ks, size, complement)
        else:
            orders = [self.orders[self._set_of_prompt[prompt]] for prompt in bucket.which.tolist()]
            masks = torch.stack([top_masks(order, ks, size, complement) for order in orders], 1)
        return self.level.prune(self.model, masks.unflatten(-1, shape))

    def metric(self, batch: int, ks: Sequence[int], complement: bool = False) -> Float[Tensor, "row prompt"]:
        """The metric of each circuit on one batch."""
        return self.metric_of(batch, self.gates(batch, ks, complement))

    def ends(self, batch: int) -> Float[Tensor, "row prompt"]:
        """The metric with all gates closed, and with all gates open. The ranking has no part in it."""
        bucket = self.batches[batch]
        shape = self.level.shape(self.model, bucket.clean.shape[1])
        shape = shape if self.level.shared else (len(bucket), *shape)
        return self.metric_of(batch, torch.stack([torch.zeros(shape), torch.ones(shape)]).bool())

    def members(self, k: int) -> list[Int[Tensor, " _gate"]]:
        """The gates of the top k that have an effect (`Level.prune`), in each gate set, best first."""
        if not self.level.shared:  # gates of single prompts are never pruned
            return [order[:k] for order in self.orders]
        mask = self.gates(0, [k])[0].flatten()
        return [order[mask[order]] for order in self.orders]

    def metric_with(self, batch: int, circuits: Sequence[Members]) -> Float[Tensor, "row prompt"]:
        """The metric of circuits that are given by their members, on one batch."""
        bucket = self.batches[batch]
        shape = self.level.shape(self.model, bucket.clean.shape[1])
        numbers = [0] if self.level.shared else [self._set_of_prompt[prompt] for prompt in bucket.which.tolist()]
        masks = torch.zeros(len(circuits), len(numbers), torch.Size(shape).numel(), dtype=torch.bool)
        for row, members in enumerate(circuits):
            for column, number in enumerate(numbers):
                masks[row, column, members[number]] = True
        gates = masks.unflatten(-1, shape)
        return self.metric_of(batch, self.level.prune(self.model, gates[:, 0] if self.level.shared else gates))

    def first_prompts(self, n: int) -> Circuits:
        """The same circuits on the first n prompts. Closed gates read the constants of all prompts."""
        if self.source in ("mean", "optimal"):
            self.constants()  # a run that resumes may not have needed them yet
        task = take(self.task, n)
        numbers = [self._set_of_prompt[prompt] for bucket in task.buckets for prompt in bucket.which.tolist()]
        orders = self.orders if self.level.shared else [self.orders[number] for number in numbers]
        return replace(self, task=task, orders=orders)

    def metric_of(self, batch: int, gates: Bool[Tensor, "row ..."]) -> Float[Tensor, "row prompt"]:
        """The metric of circuits that are given by their gates, on one batch (`gates`)."""
        bucket = self.batches[batch]
        level, length, closed = self.level.on(self.task, bucket), bucket.clean.shape[1], self._closed(batch)
        context = self.context.without(len(bucket) * self.level.closed_numbers(self.model, length))
        # The logits of a few rows at a time: those of all rows together could be larger than everything else.
        at_once = context.fits(len(bucket) * _run_numbers(self.level, self.model, length))
        metric = torch.cat(
            [
                self.task.metric(level.run(self.model, bucket.clean, rows, closed, context=context), bucket)
                for rows in gates.split(at_once)
            ]
        )
        if not metric.isfinite().all():
            raise GatelensError(
                f"the metric of {self.task.name} in {self.model.name} is not a finite number for all prompts: the "
                "model computes NaN or infinity. Load it with its check (without --no-check), or in float32."
            )
        return metric

    def measure(
        self, title: str, parts: Sequence[tuple[str, Callable[[int], Tensor]]], context: Context | None = None
    ) -> Float[Tensor, "row prompt"]:
        """The metric of circuits on all prompts of the task, in pieces from which a killed run resumes.

        Arguments:
            title: the name of this phase of the work.
            parts: of some circuits each: the name of their pieces, and a function from the number of a batch to their
                metric on it, (row, prompt).
        """
        context, n_batches = context or self.context, len(self.batches)
        context.begin(title, n_batches * len(parts))
        # One batch after the other, because only the last one keeps what its closed gates read.
        pieces = context.pieces(
            [(f"{name}-{batch}", partial(metric, batch)) for batch in range(n_batches) for name, metric in parts]
        )
        metrics = [torch.empty(len(piece), len(self.task)) for piece in pieces[: len(parts)]]
        for batch, bucket in enumerate(self.batches):
            for of_part, piece in zip(metrics, pieces[batch * len(parts) :], strict=False):
                of_part[:, bucket.which] = piece.float()
        return torch.cat(metrics) if metrics else torch.empty(0, len(self.task))

    def shuffled(self, seed: int) -> Circuits:
        """The same circuits with a random ranking: the baseline."""
        if self.level.shared:
            return replace(self, orders=[_shuffle(self.orders[0], seed)])
        prompts = {number: prompt for prompt, number in self._set_of_prompt.items()}
        seeds = [seed * 1_000_003 + prompts[number] for number in range(len(self.orders))]
        return replace(self, orders=list(map(_shuffle, self.orders, seeds)))

    @cached_property
    def _set_of_prompt(self) -> dict[int, int]:
        prompts = [prompt for bucket in self.task.buckets for prompt in bucket.which.tolist()]
        return {prompt: number for number, prompt in enumerate(prompts)}

    @cached_property
    def _closed(self) -> Any:
        """A function from the number of a batch to what closed gates read in it. It caches the last batch."""

        @lru_cache(maxsize=1)
        def closed(batch: int) -> Any:
            return self.level.closed(self.model, self.batches[batch].corrupt, self.source, self.constants)

        return closed


def circuit_numbers(level: Level[Any], model: Model, length: int, rows: int = 1) -> int:
    """How many numbers a run of circuits holds for one prompt: the run, its logits, and what closed gates read.

    Arguments:
        rows: how many circuits run together.
    """
    return rows * _run_numbers(level, model, length) + level.closed_numbers(model, length)


def _run_numbers(level: Level[Any], model: Model, length: int) -> int:
    return level.row_numbers(model, length) + 2 * int(model.hf.config.vocab_size)


def _shuffle(order: Int[Tensor, " gate"], seed: int) -> Int[Tensor, " gate"]:
    """The same positions in a random order that depends only on the seed and on which positions there are."""
    return order.sort().values[torch.randperm(len(order), generator=torch.Generator().manual_seed(seed))]
