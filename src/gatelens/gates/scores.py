"""What a method returns: a score for each gate of a level, and the order that follows from the scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.shown import Shown

if TYPE_CHECKING:
    from gatelens.gates.circuit import Circuit
    from gatelens.gates.level import Level

Ranking = Literal["per-prompt", "absolute", "signed"]
"""How scores become an order: by a prompt's absolute score, mean over prompts; by the absolute value of the mean; or by
the mean itself. A gate that helps one prompt and hurts the next cancels out in the mean."""
RANKINGS: tuple[Ranking, ...] = ("per-prompt", "absolute", "signed")

_MOST_RECORDS = 1000  # of a table of scores


class ScoredGate(NamedTuple):
    """One gate of a ranking: what it is, its name, and its score in units of the metric.

    Example:
        best, *_ = scores.top(5)
        best.gate, best.name, best.score
    """

    gate: Any  # a Head, a component edge (source, destination), or an attention edge
    name: str  # its name, such as L9H6
    score: float  # how much the metric falls when the gate is closed


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


def rank(priorities: Shaped[Tensor, " gate"]) -> Int[Tensor, " gate"]:
    """The positions of numbers, the largest first. Equal numbers keep their order, so a ranking is reproducible."""
    return torch.argsort(priorities, descending=True, stable=True)


class Scores(Shown, ABC):
    """What a method returns: one number for each gate of a level.

    The score of a gate is how much the metric falls when the gate is closed, so a gate with a positive score helps the
    task. See `Ranking` for the ways of ordering gates by their scores. A ranking by the signed score keeps only gates
    that help, and the effect of such circuits exceeds that of the whole model.

    Example:
        scores = gatelens.attribute_edges(model, task)
        scores.top(10)
        circuit = scores.circuit(200)
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
