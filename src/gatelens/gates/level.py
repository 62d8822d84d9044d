"""A level is what gates act on: heads, edges between components (also by the role of positions), or attention edges.

Everything above this room (patching, attribution, top-k circuits, curves, validity, saving, tables) is written once,
for any `Level`. A level knows how to run a model with gates, how to capture what a closed gate reads, how to
differentiate, which gates exist and what they are called, and what a row of gates costs. A new level is a new file with
a subclass of `Level` and one of `Scores` (`gatelens.gates.scores`), and an entry in `gatelens.gates.LEVELS`.

Gates have a leading *row* axis: each row is one circuit, and many circuits are evaluated in one batch. A gate of 1 lets
the clean value pass, a gate of 0 replaces it by the value of the *source*: the corrupt run, a constant, or
zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Metric
from gatelens.gates.scores import Scores
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.tasks.base import Bucket, CircuitTask

Source = Literal["corrupt", "mean", "zero", "optimal"]
"""What a closed gate reads: the corrupt run, the mean over corrupt prompts, zero, or a constant that is fitted so that
circuits stay close to the whole model."""


class PatchedGates(NamedTuple):
    """What exact patching measured, in flattened gate sets, as `Scores.gate_sets` orders them."""

    scores: Sequence[Shaped[Tensor, " _gate"]]  # mean over prompts, if these share their gates
    magnitudes: Sequence[Shaped[Tensor, " _gate"]]  # absolute scores, likewise
    measured: Sequence[Bool[Tensor, " _gate"]]
    method: str
    is_sample: bool  # whether only a sample of the gates was patched
    errors: Sequence[Shaped[Tensor, " _gate"] | None] = (None,)  # standard errors of gates that prompts share


@dataclass(frozen=True)
class Cost:
    """What work at a level costs for one prompt, in forward passes."""

    captures: float  # runs that attribution needs besides its forward-backward passes
    patch: float  # closing one gate alone
    circuit: float  # evaluating one circuit
    paths: int = 1  # paths of activations in each layer: groups of sources (`Attribution.groups`) that have gates
    learned: float = 2.0  # a run with gates that require gradients
    softmax: float = 0.0  # attention weights without each source, for each layer (`Attribution.softmax_products`)


S = TypeVar("S", bound=Scores)


class Level(ABC, Generic[S]):
    """What gates act on. The top of this module says what a level has to know."""

    name: ClassVar[str]
    noun: ClassVar[str]  # the plural noun for gates of this level, in messages and figures
    sources: ClassVar[tuple[Source, ...]]  # what a closed gate may read
    shared: ClassVar[bool]  # whether all prompts share their gates
    cost: ClassVar[Cost]
    log_axis: ClassVar[bool] = False  # whether there are so many gates that curves need a logarithmic axis
    head_map: ClassVar[str] = ""  # what `Scores.by_head` means; empty if gates do not belong to heads

    def on(self, task: CircuitTask, batch: Bucket | None = None) -> Level[S]:
        """This level on a task or, for runs, on one batch of its prompts. By default neither changes a level.

        Functions that take a level and a task call this first. A level whose gates depend on the task overrides it.
        """
        return self

    # Which gates exist

    @abstractmethod
    def shape(self, model: Model, length: int) -> tuple[int, ...]:
        """The shape of the gates of one row and, if prompts do not share their gates, of one prompt."""

    @abstractmethod
    def n_gates(self, graph: Graph, length: int) -> int:
        """How many gates a model with this graph has on a prompt of this length."""

    @abstractmethod
    def positions(self, model: Model, *runs: Any) -> list[Int[Tensor, " _gate"]]:
        """The positions of all gates in the flattened shape, in the order in which the model computes them.

        Arguments:
            runs: captured runs (`capture`) of one batch, if prompts have their own gates. A gate exists if any run has
                it.

        Returns:
            One list if all prompts share their gates, otherwise one for each prompt of the batch.
        """

    def count(self, model: Model, order: Int[Tensor, " gate"], k: int) -> int:
        """How many gates the circuit of the top k keeps after gates without an effect are removed."""
        return min(k, len(order))

    def copies(self, model: Model) -> Int[Tensor, " _size"] | None:
        """How many gates each position stands for in packages that give every query head its own k and v input.

        None: each gate is one gate there, too.
        """
        return None

    def prune(self, model: Model, gates: Bool[Tensor, "row ..."]) -> Bool[Tensor, "row ..."]:
        """Remove the gates of circuits that have no effect. By default none is removed."""
        return gates

    def random_addition(
        self,
        model: Model,
        circuit: Int[Tensor, " _kept"],
        others: Int[Tensor, " _other"],
        generator: torch.Generator,
    ) -> Int[Tensor, " _added"]:
        """Gates to add to a circuit at random, so that the circuit uses them. By default this is one gate.

        Arguments:
            circuit: the positions of the gates of the circuit.
            others: the positions of all other gates.
        """
        return others[torch.randint(max(1, len(others)), (min(1, len(others)),), generator=generator)]

    def grid(self, total: int, points: int = 0) -> list[int]:
        """The numbers of gates to keep in a curve, from 0 to all. By default they are spaced by their logarithm.

        Arguments:
            total: the number of gates.
            points: how many numbers; 0 gives a grid that suits the level.
        """
        return log_grid(total, points or 32)

    # Runs

    @abstractmethod
    def capture(self, model: Model, tokens: Int[Tensor, "prompt position"]) -> Any:
        """Run the model without gates and capture what this level needs. The run has ``logits`` (prompt, vocab)."""

    @abstractmethod
    def closed(
        self, model: Model, tokens: Int[Tensor, "prompt position"], source: Source, mean: Callable[[], Any]
    ) -> Any:
        """What closed gates read in a batch.

        Arguments:
            tokens: the corrupt prompts of the batch.
            source: where the values come from.
            mean: computes the constants that closed gates read (`Level.mean`, `Level.optimal`), if the source is one.
        """

    def mean(self, model: Model, batches: Iterable[Int[Tensor, "_prompt _position"]]) -> Any:
        """What a closed gate reads if its source is the mean over these prompts and all their positions."""
        raise GatelensError(f"{self.noun} have no mean: closed gates can read {' or '.join(self.sources)}.")

    def optimal(self, model: Model, batches: Sequence[Bucket], context: Context) -> Any:
        """What a closed gate reads if its source is a constant that is fitted on these prompts."""
        others = " or ".join(self.sources)
        raise GatelensError(f"no optimal constants are fitted for {self.noun}: closed gates can read {others}.")

    def constant_tensors(self, constants: Any) -> dict[str, Tensor]:
        """Fitted constants (`optimal`) as tensors to save, by name. By default there is one for each layer."""
        return {str(layer): values for layer, values in enumerate(constants)}

    @abstractmethod
    def reads(self, run: Any) -> Any:
        """What closed gates read if their source is this captured run."""

    @abstractmethod
    def run(
        self,
        model: Model,
        tokens: Int[Tensor, "prompt position"],
        gates: Shaped[Tensor, "row ..."],
        closed: Any,
        *,
        start: Any = None,
        context: Context,
    ) -> Float[Tensor, "row prompt vocab"]:
        """Logits at the last position under each row of gates.

        Arguments:
            gates: (row, *shape), or (row, prompt, *shape) if prompts do not share their gates.
            closed: what closed gates read (`closed`, `reads`).
            start: the captured run of the same tokens; layers below the first closed gate are then not run again.
        """

    @abstractmethod
    def attribution(self, model: Model, batch: Bucket, metric: Metric) -> Attribution:
        """What attribution needs of one batch at this level. The clean and the corrupt run are captured here."""

    # Scores

    @abstractmethod
    def attributed(self, model: Model, task: CircuitTask, pieces: Iterable[Tensor], method: str) -> S:
        """Scores from what was saved of each batch (`Attribution.piece`). Pieces that add up are not held together."""

    @abstractmethod
    def patched(self, model: Model, task: CircuitTask, gates: PatchedGates) -> S:
        """Scores from exact patching."""

    @abstractmethod
    def read_scores(self, tensors: Mapping[str, Tensor], graph: Graph, method: str) -> Scores:
        """The scores whose `Scores.tensors` were saved."""

    # Memory, in float32 numbers

    @abstractmethod
    def row_numbers(self, model: Model, length: int) -> int:
        """How many numbers a run holds for one row of gates and one prompt."""

    def learned_numbers(self, model: Model, length: int) -> int:
        """How many numbers `run` holds for one row and one prompt if gates require gradients."""
        raise GatelensError(f"gates on {self.noun} cannot be learned: their runs do not pass gradients to gates.")

    @abstractmethod
    def closed_numbers(self, model: Model, length: int) -> int:
        """How many numbers of what closed gates read stay in memory for one prompt."""

    @abstractmethod
    def attribute_numbers(self, model: Model, length: int) -> int:
        """How many numbers an `Attribution` and one of its passes hold for one prompt."""

    def held_numbers(self, model: Model, length: int) -> int:
        """How many numbers scores and rankings of a prompt hold until a job ends; 0 if prompts share their gates."""
        return 0

    def rows_at_once(self, model: Model) -> int:
        """How many gates are patched in one piece of work."""
        return 16

    def check_source(self, source: Source) -> None:
        """Raise an error if closed gates of this level cannot read this source."""
        if source not in self.sources:
            raise GatelensError(
                f"no source '{source}' for {self.noun}: closed gates can read {' or '.join(self.sources)}."
            )


def log_grid(total: int, points: int) -> list[int]:
    """Numbers from 0 to the total that are evenly spaced by their logarithm."""
    if total < 1:
        return [0]  # a sparse model may have no open edge at all
    spaced = torch.logspace(0, torch.log10(torch.tensor(float(total))).item(), points - 1)
    return sorted({0, *(min(total, round(k)) for k in spaced.tolist()), total})


def fine_grid(total: int, step: float = 0.05) -> list[int]:
    """Numbers from 0 to the total whose neighbours differ by one, or by at most ``step`` of the larger one."""
    numbers = [0]
    while numbers[-1] < total:
        numbers.append(min(total, max(numbers[-1] + 1, int(numbers[-1] / (1 - step)))))
    return numbers


def top_masks(order: Int[Tensor, " gate"], ks: Sequence[int], size: int, complement: bool) -> Bool[Tensor, "row size"]:
    """For each k, the mask of the first k positions of an order or, for the complement, of its other positions."""
    masks = torch.zeros(len(ks), size, dtype=torch.bool)
    for mask, k in zip(masks, ks, strict=True):
        mask[order[k:] if complement else order[:k]] = True
    return masks
