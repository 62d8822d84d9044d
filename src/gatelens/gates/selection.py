"""Selections: how scores become an order of gates, of which a circuit keeps the first k.

A selection is a registered value. To add one, make a `Selection` and `register` it: settings, the command line,
circuits, figures and exports read the registry. A selection may have a number, which users write after its name:
``positive-ratio=0.8``.

Consistent gates and the ratio of positive gates are from Nikankin et al., arXiv 2510.25786.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.edges import EdgeScores
from gatelens.gates.scores import Ranking, Scores
from gatelens.model.graph import Graph
from gatelens.runtime.settings import unknown_name

TOP = "top"
"""The name of the plain selection."""


@dataclass(frozen=True)
class Selection:
    """A way of ordering gates, given their scores.

    Arguments:
        name: the value of ``--selection``.
        orders: called as orders(scores, ranking), or orders(scores, ranking, share) if it has a share; for each gate
            set of the scores, the positions of all its gates in the flattened set, in the order in which a growing
            circuit takes them.
        help: one line for the command line.
        levels: the names of the levels that it works on; None: every level.
        share: its number, above 0 and at most 1, unless the user gives another; None: it has none.
    """

    name: str
    orders: Callable[..., list[Int[Tensor, " _gate"]]]
    help: str
    levels: tuple[str, ...] | None = None
    share: float | None = None

    def order(self, scores: Scores, ranking: Ranking) -> list[Int[Tensor, " _gate"]]:
        """For each gate set of the scores, its gates in the order in which circuits take them."""
        return self.orders(scores, ranking) if self.share is None else self.orders(scores, ranking, self.share)

    def with_share(self, text: str) -> Selection:
        """The same selection with the share that a user wrote after its name."""
        try:
            share = float(text)
        except ValueError:
            share = 0.0
        if self.share is None or not 0 < share <= 1:
            what = "it has no number" if self.share is None else "its number must be above 0 and at most 1"
            raise GatelensError(f"no selection '{self.name}={text}': {what}. Write '{self._example()}'.")
        return replace(self, name=f"{self.name}={share:g}", share=share)

    def _example(self) -> str:
        return self.name if self.share is None else f"{self.name}={self.share:g}"

    def check_level(self, level: str) -> None:
        """Raise an error if the selection does not work on this level."""
        if self.levels is not None and level not in self.levels:
            raise GatelensError(
                f"the selection '{self.name}' does not select {level}: it selects {', '.join(self.levels)}. Use "
                f"'{TOP}'."
            )


_SELECTIONS: dict[str, Selection] = {}


def register(selection: Selection) -> Selection:
    """Add a selection to the registry and return it. Two selections must not have the same name."""
    if selection.name in _SELECTIONS:
        raise ValueError(f"the selection {selection.name} is registered twice")
    _SELECTIONS[selection.name] = selection
    return selection


def selections() -> dict[str, Selection]:
    """All registered selections by name."""
    return dict(_SELECTIONS)


def selection_named(name: str) -> Selection:
    """The selection with this name, which may end with a number; an error lists the names that exist.

    Example:
        selection_named("positive-ratio=0.8").share
    """
    name, with_number, number = name.partition("=")
    if name not in _SELECTIONS:
        raise GatelensError(unknown_name("selection", name, _SELECTIONS))
    return _SELECTIONS[name].with_share(number) if with_number else _SELECTIONS[name]


def selected(scores: Scores, ranking: Ranking = "absolute", selection: str = TOP) -> list[Int[Tensor, " _gate"]]:
    """For each gate set of the scores, its gates in the order in which circuits take them.

    Example:
        [order] = selected(scores, "per-prompt", "path")
        first_50 = order[:50]
    """
    chosen = selection_named(selection)
    chosen.check_level(scores.level.name)
    return chosen.order(scores, ranking)


def grown(graph: Graph, priorities: Shaped[Tensor, "source destination"]) -> Int[Tensor, " edge"]:
    """All edges in the order in which a circuit grows from the logits.

    The next edge is the one with the highest priority whose destination is already in the circuit. If its source is a
    new component, the best edge into that component follows, and so on down to a component that is in the circuit or to
    the embedding. So nearly all of the first k edges are on a path from the embedding to the logits, for every k.

    Returns:
        (edge,) the positions of all edges in the flattened (source, destination).
    """
    growth = _Growth(graph, priorities)
    growth.reach([graph.logits])
    while growth.offers:
        growth.take_next()
    return torch.tensor(growth.order)


class _Growth:
    """A circuit that grows. Every destination in it has its edges sorted, and offers its best one that is left."""

    def __init__(self, graph: Graph, priorities: Tensor) -> None:
        self.graph = graph
        self.reads, self.values = graph.reads.tolist(), priorities.T.tolist()
        by_priority = priorities.where(graph.edges, -torch.inf).argsort(dim=0, descending=True, stable=True)
        self.sources = by_priority.T.tolist()  # [destination], the best source first
        self.offers: list[tuple[float, int, int]] = []  # -priority, destination, place in the destination's order
        self.reached: set[int] = set()  # destinations
        self.fed = {0}  # sources with a path from the embedding
        self.taken: set[tuple[int, int]] = set()
        self.order: list[int] = []

    def reach(self, destinations: list[int]) -> None:
        """Add destinations, which then offer their edges."""
        for destination in destinations:
            if destination not in self.reached:
                self.reached.add(destination)
                self._offer(destination, 0)

    def take_next(self) -> None:
        """Take the best edge that is offered, and a path from the embedding to its source."""
        _, destination, place = heapq.heappop(self.offers)
        self._offer(destination, place + 1)
        source = self.sources[destination][place]
        self._take(source, destination)
        while source not in self.fed:
            self.fed.add(source)
            best = max(
                self.graph.inputs_of(source), key=lambda its_input: self.values[its_input][self._best(its_input)]
            )
            source = self._best(best)
            self._take(source, best)

    def _best(self, destination: int) -> int:
        return int(self.sources[destination][0])

    def _offer(self, destination: int, place: int) -> None:
        if place < self.reads[destination]:
            value = self.values[destination][self.sources[destination][place]]
            heapq.heappush(self.offers, (-value, destination, place))

    def _take(self, source: int, destination: int) -> None:
        if (source, destination) not in self.taken:
            self.taken.add((source, destination))
            self.order.append(source * self.graph.n_destinations + destination)
            self.reach(self.graph.inputs_of(source))


def _grow(scores: Scores, ranking: Ranking) -> list[Int[Tensor, " _gate"]]:
    assert isinstance(scores, EdgeScores)
    [gate_set] = scores.gate_sets()
    return [grown(scores.graph, gate_set.priorities(ranking))]


def _consistent_first(scores: Scores, ranking: Ranking, share: float) -> list[Int[Tensor, " _gate"]]:
    """The gates whose score keeps its sign in this share of resamplings first, then all others."""
    orders = []
    for gate_set, order in zip(scores.gate_sets(), scores.orders(ranking), strict=True):
        consistent = gate_set.same_sign().flatten()[order] >= share
        orders.append(torch.cat([order[consistent], order[~consistent]]))
    return orders


def _with_positives(scores: Scores, ranking: Ranking, share: float) -> list[Int[Tensor, " _gate"]]:
    """Of the first k gates, at least this share has a positive score, for every k, as long as there are such gates."""
    orders = []
    for gate_set, order in zip(scores.gate_sets(), scores.orders(ranking), strict=True):
        is_positive = (gate_set.scores.flatten()[order] > 0).tolist()
        # Places in the ranking. Both lists are in its order, so the better of the two next gates has the smaller place.
        positives = deque(place for place, positive in enumerate(is_positive) if positive)
        others = deque(place for place, positive in enumerate(is_positive) if not positive)
        n_positives, places = 0, list[int]()
        while positives or others:
            needed = n_positives < share * (len(places) + 1)
            if positives and (needed or not others or positives[0] < others[0]):
                places.append(positives.popleft())
                n_positives += 1
            else:
                places.append(others.popleft())
        orders.append(order[torch.tensor(places, dtype=torch.int64)])
    return orders


register(Selection(TOP, lambda scores, ranking: scores.orders(ranking), "the best gates of the ranking"))
register(Selection("path", _grow, "grow a connected circuit from the logits", ("edges",)))
register(
    Selection(
        "consistent",
        _consistent_first,
        "first the gates whose score has the same sign in 95 % of resamplings of the prompts, or consistent=SHARE",
        share=0.95,
    )
)
register(
    Selection(
        "positive-ratio",
        _with_positives,
        "at least 75 % of the gates have a positive score, or positive-ratio=SHARE",
        share=0.75,
    )
)
