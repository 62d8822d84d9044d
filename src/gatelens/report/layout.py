"""Where the components of a circuit stand when it is drawn: by layer from bottom to top, with few crossings.

Components are named as in `Graph`: ``embed``, ``L3H7``, ``M3``, ``logits``, and ``L3KV2`` where
heads share keys and values. A layer is a band of its own: KV heads stand lowest in it, then heads, then the MLP, so
that every edge points upwards. Along a layer there are slots, one component to a slot at the most. Components begin
near the mean of what they are connected to (barycentre sweeps); then each in turn moves to the free slot where its
straight edges cross the fewest others and run under the fewest boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatelens.model.components import Component, Head
from gatelens.model.graph import Graph

Edge = tuple[int, int]  # source and destination, by number
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_STAGGER = {"KV": -0.3, "H": 0.0, "M": 0.3}  # height inside the band of a layer
_HALF_A_BOX = 0.55  # in slots
# What a place costs, against 1 for a crossing: an edge that seems to enter a box is worse; sideways length, for each
# slot, only decides between equals, but a KV head is to stand near its heads.
_UNDER_A_BOX, _LENGTH, _LINK = 4.0, 0.05, 0.5
_WORK = 2e8  # pairs of edges to compare at the most: bounds the time to about two seconds


def component(name: str) -> str:
    """The component that a source or a destination belongs to: ``L3H7`` for ``L3H7.q``."""
    return name.partition(".")[0]


def components(graph: Graph, kept: Iterable[Edge]) -> list[str]:
    """The components with a kept edge, from bottom to top and, in a layer, in the order of their numbers."""
    names = {name for source, destination in kept for name in _ends(graph, source, destination)}
    return sorted(names, key=_order)


def links(graph: Graph, names: Sequence[str]) -> list[tuple[str, str]]:
    """Which of these KV heads serve which of these heads: they are joined by the model, not by an edge."""
    group, there = graph.n_heads // graph.n_kv_heads, set(names)
    pairs = []
    for name in names:
        layer, kind, index = _place(name)
        if kind == "KV":
            heads = (str(Head(layer, head)) for head in range(index * group, (index + 1) * group))
            pairs += [(name, head) for head in heads if head in there]
    return pairs


def layout(graph: Graph, kept: Sequence[Edge]) -> dict[str, tuple[float, float]]:
    """Where each component with a kept edge stands: name -> (x, y), both in 0..1, the embedding's y 0, the logits' 1.

    kept: edges as (source, destination) numbers. The same circuit always gives the same places. Layers without a
    component take no room. Cost: below a second for 200 edges; past some 2,000 only the sweeps are made.
    """
    names = components(graph, kept)
    if not names:
        return {}
    number = {name: i for i, name in enumerate(names)}
    joined = {_ends(graph, source, destination) for source, destination in kept} | set(links(graph, names))
    ends = np.array(sorted((number[a], number[b]) for a, b in joined), dtype=np.int64).reshape(-1, 2)
    near = np.array([_LINK if names[a].find("KV") > 0 else _LENGTH for a, _ in ends])
    rows, heights = _heights(names)
    n_slots = max(7, int(1.5 * max(np.bincount(rows))))
    slots = _sweep(rows, ends, near, n_slots)
    # A pass compares each edge, once for either end, with every other edge in every slot.
    passes = min(8, int(_WORK / (2 * len(ends) ** 2 * n_slots)))
    drawing = _Drawing(heights, ends[:, 0], ends[:, 1], near)
    for _ in range(passes):
        if not _improve(slots, rows, drawing, n_slots):
            break
    return {
        name: ((float(slot) + 0.5) / n_slots, float(y)) for name, slot, y in zip(names, slots, heights, strict=True)
    }


def _ends(graph: Graph, source: int, destination: int) -> tuple[str, str]:
    return graph.source_names[source], component(graph.destination_names[destination])


def _place(name: str) -> tuple[int, str, int]:
    """Layer, kind (``H``, ``KV``, ``M`` or none) and number in the layer."""
    part = Component.find(name)
    if part is None:  # The embedding is below all layers, the logits are above them.
        return (-1 if name == "embed" else 10**6), "", 0
    return part.layer, part.kind, part.index


def _order(name: str) -> tuple[int, float, int]:
    layer, kind, index = _place(name)
    return layer, _STAGGER.get(kind, 0.0), index


def _heights(names: Sequence[str]) -> tuple[Ints, Floats]:
    """The row of each component, 0 for the lowest in use, and its height in 0..1."""
    places = [_place(name) for name in names]
    bands = {layer: i + 1 for i, layer in enumerate(sorted({layer for layer, kind, _ in places if kind}))}
    bands |= {-1: 0, 10**6: len(bands) + 1}
    heights = [(bands[layer] + _STAGGER.get(kind, 0.0)) / (len(bands) - 1) for layer, kind, _ in places]
    return np.array([bands[layer] for layer, _, _ in places], dtype=np.int64), np.array(heights)


def _sweep(rows: Ints, ends: Ints, near: Floats, n_slots: int) -> Ints:
    """Slots by barycentre sweeps: in turn from bottom to top and back, components go near what they are joined to."""
    x = np.zeros(len(rows))
    by_row = [np.flatnonzero(rows == row) for row in range(rows.max() + 1)]
    for members in by_row:
        x[members] = _spread(np.arange(len(members), dtype=np.float64), n_slots)
    matrix = np.zeros((len(rows), len(rows)))
    matrix[ends[:, 0], ends[:, 1]] = matrix[ends[:, 1], ends[:, 0]] = near
    for turn in range(8):
        for members in by_row[:: 1 if turn % 2 == 0 else -1]:
            if len(members):
                pull = matrix[members] @ x / matrix[members].sum(1)
                x[members] = _spread(pull, n_slots)
    return x.astype(np.int64)


def _spread(wanted: Floats, n_slots: int) -> Floats:
    """Free slots near those wanted, in their order."""
    order = np.argsort(wanted, kind="stable")
    slots = np.clip(np.round(wanted[order]), 0, n_slots - 1)
    for i in range(1, len(slots)):  # no two in one slot: push to the right,
        slots[i] = max(slots[i], slots[i - 1] + 1)
    for i in range(len(slots) - 1, -1, -1):  # and back from the right end
        slots[i] = min(slots[i], n_slots - len(slots) + i)
    placed = np.empty_like(slots)
    placed[order] = slots
    return placed


def _improve(slots: Ints, rows: Ints, drawing: _Drawing, n_slots: int) -> bool:
    """Move each component to its best free slot; True if any moved. Changes ``slots``."""
    moved = False
    for one in range(len(slots)):
        others = (rows == rows[one]) & (np.arange(len(rows)) != one)
        free = np.setdiff1d(np.arange(n_slots), slots[others])
        costs = drawing.costs(one, free.astype(np.float64), slots.astype(np.float64))
        if costs.min() < costs[free == slots[one]][0] - 1e-9:
            slots[one] = free[costs.argmin()]
            moved = True
    return moved


@dataclass(frozen=True, eq=False)
class _Drawing:
    """What stays while components move along their layers: heights (component,), and edges from low to high."""

    heights: Floats
    low: Ints  # (edge,) the component at its lower end
    high: Ints  # (edge,)
    near: Floats  # (edge,) the price of its sideways length, for each slot

    def costs(self, one: int, free: Floats, x: Floats) -> Floats:
        """What the place of a component costs, for each slot that it may take, the others standing at x: (slot,)."""
        touches = (self.low == one) | (self.high == one)
        mine, rest = np.flatnonzero(touches), np.flatnonzero(~touches)
        far = self.low[mine] + self.high[mine] - one  # the other ends of its edges
        # 1. Its edges against the others: where both pass, they cross if they change sides.
        bottom = np.maximum(self._bottom(mine)[:, None], self._bottom(rest))
        top = np.minimum(self._top(mine)[:, None], self._top(rest))
        apart = (far[:, None] != self.low[rest]) & (far[:, None] != self.high[rest])
        i, j = np.nonzero(apart & (bottom < top))
        begin, end = (
            self._moving(one, mine[i], y[i, j], free, x) - self._standing(rest[j], y[i, j], x) for y in (bottom, top)
        )
        crossed = (begin * end < 0).sum(1)
        # 2. Its edges under other boxes, and other edges under its own.
        i, boxes = np.nonzero((self._bottom(mine)[:, None] < self.heights) & (self.heights < self._top(mine)[:, None]))
        under = np.abs(self._moving(one, mine[i], self.heights[boxes], free, x) - x[boxes]) < _HALF_A_BOX
        passing = rest[(self._bottom(rest) < self.heights[one]) & (self.heights[one] < self._top(rest))]
        over = np.abs(self._standing(passing, self.heights[[one]], x) - free[:, None]) < _HALF_A_BOX
        # 3. How far they go sideways.
        length = np.abs(free[:, None] - x[far]) @ self.near[mine]
        return crossed + _UNDER_A_BOX * (under.sum(1) + over.sum(1)) + length

    def _bottom(self, edges: Ints) -> Floats:
        return self.heights[self.low[edges]]

    def _top(self, edges: Ints) -> Floats:
        return self.heights[self.high[edges]]

    def _share(self, edges: Ints, y: Floats) -> Floats:
        """How far up these edges the heights y are, 0..1."""
        return (y - self._bottom(edges)) / (self._top(edges) - self._bottom(edges))

    def _standing(self, edges: Ints, y: Floats, x: Floats) -> Floats:
        """Where these edges pass the heights y."""
        share = self._share(edges, y)
        return (1 - share) * x[self.low[edges]] + share * x[self.high[edges]]

    def _moving(self, one: int, edges: Ints, y: Floats, free: Floats, x: Floats) -> Floats:
        """Where these edges of one component pass the heights y, for each of its slots: (slot, edge)."""
        share = self._share(edges, y)
        mine = np.where(self.low[edges] == one, 1 - share, share)
        far = self.low[edges] + self.high[edges] - one
        return free[:, None] * mine + (1 - mine) * x[far]
