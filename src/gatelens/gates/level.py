"""A level is what gates act on: heads, edges between components, or attention edges.

Everything above this room (patching, attribution, top-k circuits, curves, validity, saving, tables) is written once,
for any `Level`. A level knows how to run a model with gates, how to capture what a closed gate reads, how to
differentiate, which gates exist and what they are called, and what a row of gates costs. A new level is a new file with
a subclass of `Level` and one of `Scores`, and an entry in `gatelens.gates.LEVELS`.

Gates have a leading *row* axis: each row is one circuit, and many circuits are evaluated in one batch. A gate of 1 lets
the clean value pass, a gate of 0 replaces it by the value of the *source*: the corrupt run, a constant, or
zero.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attribution import Attribution
from gatelens.gates.gradients import Metric
from gatelens.model import Model
from gatelens.model.graph import Graph
from gatelens.runtime.context import Context
from gatelens.runtime.shown import Shown
from gatelens.tasks.base import Bucket, CircuitTask

if TYPE_CHECKING:
    from gatelens.gates.circuit import Circuit

Source = Literal["corrupt", "mean", "zero", "optimal"]
"""What a closed gate reads: the corrupt run, the mean over corrupt prompts, zero, or a constant that is fitted so that
circuits stay close to the whole model."""
Ranking = Literal["per-prompt", "absolute", "signed"]
"""How scores become an order: by a prompt's absolute score, mean over prompts; by the absolute value of the mean; or by
the mean itself. A gate that helps one prompt and hurts the next cancels out in the mean."""
RANKINGS: tuple[Ranking, ...] = ("per-prompt", "absolute", "signed")


_MOST_RECORDS = 1000


class ScoredGate(NamedTuple):
    """One gate of a ranking: what it is, its name, and its score in units of the metric."""

    gate: Any  # a Head, a component edge (source, destination), or an attention edge
    name: str
    score: float


class GateSet(NamedTuple):
    """Gates that are ranked together. All tensors have the same shape."""

    scores: Shaped[Tensor, ...]  # mean over prompts
    exists: Bool[Tensor, ...]  # True where a gate exists and has a score
    magnitudes: Shaped[Tensor, ...] | None = None  # absolute scores, mean over prompts; None: not known
    errors: Shaped[Tensor, ...] | None = None  # standard errors of the scores, over prompts; None: not known

    def same_sign(self) -> Shaped[Tensor, ...]:
        """In which share of resamplings of the prompts the score has the sign that it has; 0 if the score is 0.

        The share is that of a normal distribution with the mean and the standard error of the score, which the mean
        over resampled prompts approaches. So no resampling is drawn, and no score of a single prompt is kept.
        """
        if self.errors is None:
            raise GatelensError(
                "these scores have no standard errors over prompts, so it is not known which of them are consistent: "
                "use a method that scores every prompt, such as eap-ig or patching, at least two prompts, and a level "
                "whose gates all prompts share."
            )
        distance = self.scores.abs() / self.errors  # infinite if all prompts have the same score
        return torch.special.ndtr(distance).where(self.scores != 0, 0)

    def priorities(self, by: Ranking) -> Shaped[Tensor, ...]:
        """What a ranking sorts by, the largest first."""
        if by == "per-prompt":
            if self.magnitudes is None:
                raise GatelensError(
                    "these scores are means over prompts only, so gates cannot be ranked per prompt: rank them by "
                    "absolute or signed scores, or score them again."
                )
            return self.magnitudes
        return self.scores.abs() if by == "absolute" else self.scores


class PatchedGates(NamedTuple):
    """What exact patching measured, in flattened gate sets, as `Scores.gate_sets` orders them."""

    scores: Sequence[Shaped[Tensor, " _gate"]]
    magnitudes: Sequence[
        Shaped[Tensor, " _gate"]
    ]  # absolute scores; like the scores, mean over prompts that share gates
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


def rank(priorities: Shaped[Tensor, " gate"]) -> Int[Tensor, " gate"]:
    """The positions of numbers, the largest first. Equal numbers keep their order, so a ranking is reproducible."""
    return torch.argsort(priorities, descending=True, stable=True)


class Scores(Shown, ABC):
    """What a method returns: one number for each gate of a level.

    The score of a gate is how much the metric falls when the gate is closed, so a gate with a positive score helps the
    task. See `Ranking` for the ways of ordering gates by their scores. A ranking by the signed score keeps only gates
    that help, and the effect of such circuits exceeds that of the whole model.
    """

    method: str
    drawn_by = "gatelens.report.plots:plot_scores"

    @property
    @abstractmethod
    def level(self) -> Level[Any]:
        """What the gates act on."""

    @property
    @abstractmethod
    def is_sample(self) -> bool:
        """Whether only a sample of the gates was scored."""

    @abstractmethod
    def gate_sets(self) -> list[GateSet]:
        """The gates that are ranked together: one set if all prompts share their gates, otherwise one for each prompt.

        The sets of prompts are in the order of the task's buckets.
        """

    @abstractmethod
    def gate(self, number: int, position: int) -> tuple[Any, str]:
        """A gate and its name.

        Arguments:
            number: the number of its gate set (`gate_sets`).
            position: its position in the flattened set.
        """

    @abstractmethod
    def membership(self, k: int, orders: Sequence[Int[Tensor, " _gate"]]) -> Float[Tensor, " _member"]:
        """How often each possible member of a circuit is among the first k. Used to compare the circuits of two runs.

        Arguments:
            orders: the order of the gates of each gate set (`orders`).
        """

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, by name. `Level.read_scores` is the inverse."""

    def compact(self) -> Scores:
        """What a report needs of these scores, small enough to share: themselves, or the best of very many gates."""
        return self

    def orders(
        self, by: Ranking = "absolute", copies: Int[Tensor, " _size"] | None = None
    ) -> list[Int[Tensor, " _gate"]]:
        """For each gate set, the positions of its gates in the flattened set, from best to worst.

        Arguments:
            copies: how many gates each position stands for (`Level.copies`); each of them has its part of the score.
        """
        orders = []
        for gate_set in self.gate_sets():
            positions = gate_set.exists.flatten().nonzero()[:, 0]
            priorities = gate_set.priorities(by).flatten()
            orders.append(positions[rank((priorities if copies is None else priorities / copies)[positions])])
        return orders

    def top(self, k: int, by: Ranking = "absolute") -> list[ScoredGate]:
        """The k best gates, best first, with their names and scores.

        Example:
            [(gate, name, score), *others] = scores.top(10)
        """
        best: list[tuple[float, int, int, float]] = []
        for number, (order, gate_set) in enumerate(zip(self.orders(by), self.gate_sets(), strict=True)):
            first = order[:k]
            priorities, scores = (x.flatten()[first].tolist() for x in (gate_set.priorities(by), gate_set.scores))
            best += zip(priorities, [number] * len(first), first.tolist(), scores, strict=True)
        best.sort(key=lambda gate: -gate[0])  # equal priorities keep their order
        return [ScoredGate(*self.gate(number, position), score) for _, number, position, score in best[:k]]

    def circuit(self, k: int, by: Ranking = "absolute", selection: str = "top") -> Circuit:
        """The circuit of the k best gates; of each prompt, if prompts have their own gates.

        Gates that have no effect are left out: edges on no path from the embedding to the logits.
        """
        from gatelens.gates.circuit import make_circuit

        return make_circuit(self, k, by, selection)

    def ends(self, gate: Any) -> tuple[str, ...]:
        """The names of what a gate connects: source and destination of an edge, or the one component it acts on."""
        return (str(gate),)

    def effective(self, mask: Bool[Tensor, ...]) -> Bool[Tensor, ...]:
        """Remove the gates of a circuit that have no effect. By default none is removed."""
        return mask

    def records(self) -> list[dict[str, Any]]:
        """The best gates, best first: all of them, or the first 1,000."""
        return [{"gate": name, "score": score} for _, name, score in self.top(_MOST_RECORDS)]

    def headline(self) -> str:
        return f"scores of {self.level.noun} by {self.method}, best first"

    def by_head(self) -> Float[Tensor, "layer head"] | None:
        """A score for each head, for a heat map; None if the gates do not belong to heads."""
        return None

    def head_weights(self) -> Float[Tensor, "layer head"] | None:
        """A number that ranks heads, by its absolute value; None if the gates have nothing to do with heads."""
        return self.by_head()


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
    def attributed(self, model: Model, task: CircuitTask, pieces: Sequence[Tensor], method: str) -> S:
        """Scores from what was saved of each batch (`Attribution.piece`)."""

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
