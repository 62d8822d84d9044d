"""Where the components of a circuit stand when it is drawn: by layer from bottom to top, with few crossings.

A layer is a horizontal band: KV heads stand lowest in it, then heads, then the MLP, so that every edge points upwards.
A layer has slots, and a slot holds at most one component. Components start near the mean position of what they are
connected to (barycentre sweeps). Then each of them in turn moves to the free slot where its straight edges cross the
fewest others and run under the fewest boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gatelens.model.components import Component
from gatelens.model.graph import Graph
from gatelens.report._components import STAGGER, Edge, connected_components, edge_ends, links

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_HALF_A_BOX = 0.55  # in slots
# The cost of a position, in units of one crossing. An edge that seems to enter a box is worse than a crossing. Sideways
# length (per slot) only decides between equal positions, except that a KV head should stand near its heads.
_UNDER_A_BOX, _LENGTH, _LINK = 4.0, 0.05, 0.5
_MOST_COMPARISONS = 2e8  # of pairs of edges: limits the time to about two seconds


def layout(graph: Graph, edges: Sequence[Edge]) -> dict[str, tuple[float, float]]:
    """Where each component of these edges stands.

    The same circuit always gives the same positions. Layers without a component take no room. Cost: below a second for
    200 edges; above about 2,000 edges only the sweeps are made.

    Returns:
        name -> (x, y), both in 0..1; the embedding has y = 0 and the logits have y = 1.
    """
    names = connected_components(graph, edges)
    if not names:
        return {}
    number = {name: i for i, name in enumerate(names)}
    connected = {edge_ends(graph, edge) for edge in edges} | set(links(graph, names))
    ends = np.array(sorted((number[a], number[b]) for a, b in connected), dtype=np.int64).reshape(-1, 2)
    weights = np.array([_LINK if _is_kv(names[a]) else _LENGTH for a, _ in ends])
    bands, heights = _heights(names)
    n_slots = max(7, int(1.5 * max(np.bincount(bands))))
    slots = _sweep(bands, ends, weights, n_slots)
    # One pass compares each edge, once for each of its ends, with every other edge in every slot.
    passes = min(8, int(_MOST_COMPARISONS / (2 * len(ends) ** 2 * n_slots)))
    drawing = _Drawing(heights, ends[:, 0], ends[:, 1], weights)
    for _ in range(passes):
        if not _improve(slots, bands, drawing, n_slots):
            break
    return {
        name: ((float(slot) + 0.5) / n_slots, float(y)) for name, slot, y in zip(names, slots, heights, strict=True)
    }


def _is_kv(name: str) -> bool:
    component = Component.find(name)
    return component is not None and component.kind == "KV"


def _heights(names: Sequence[str]) -> tuple[Ints, Floats]:
    """The band of each component, 0 for the lowest one in use, and its height in 0..1."""
    components = [Component.find(name) for name in names]
    layers = sorted({component.layer for component in components if component is not None})
    top = len(layers) + 1
    bands, heights = [], []
    for name, component in zip(names, components, strict=True):
        if component is None:
            bands.append(0 if name == "embed" else top)
            heights.append(bands[-1] / top)
        else:
            bands.append(layers.index(component.layer) + 1)
            heights.append((bands[-1] + STAGGER[component.kind]) / top)
    return np.array(bands, dtype=np.int64), np.array(heights)


def _sweep(bands: Ints, ends: Ints, weights: Floats, n_slots: int) -> Ints:
    """Slots by barycentre sweeps, up and down in turn: each component moves near what it is connected to."""
    x = np.zeros(len(bands))
    by_band = [np.flatnonzero(bands == band) for band in range(bands.max() + 1)]
    for members in by_band:
        x[members] = _spread(np.arange(len(members), dtype=np.float64), n_slots)
    matrix = np.zeros((len(bands), len(bands)))
    matrix[ends[:, 0], ends[:, 1]] = matrix[ends[:, 1], ends[:, 0]] = weights
    for turn in range(8):
        for members in by_band[:: 1 if turn % 2 == 0 else -1]:
            if len(members):
                pull = matrix[members] @ x / matrix[members].sum(1)
                x[members] = _spread(pull, n_slots)
    return x.astype(np.int64)


def _spread(targets: Floats, n_slots: int) -> Floats:
    """Different slots near the target positions, in the same order."""
    order = np.argsort(targets, kind="stable")
    slots = np.clip(np.round(targets[order]), 0, n_slots - 1)
    for i in range(1, len(slots)):  # push components in an occupied slot to the right
        slots[i] = max(slots[i], slots[i - 1] + 1)
    for i in range(len(slots) - 1, -1, -1):  # push components beyond the right end back
        slots[i] = min(slots[i], n_slots - len(slots) + i)
    placed = np.empty_like(slots)
    placed[order] = slots
    return placed


def _improve(slots: Ints, bands: Ints, drawing: _Drawing, n_slots: int) -> bool:
    """Move each component to its best free slot, in place. Returns whether any component moved."""
    moved = False
    for mover in range(len(slots)):
        others = (bands == bands[mover]) & (np.arange(len(bands)) != mover)
        free = np.setdiff1d(np.arange(n_slots), slots[others])
        costs = drawing.costs(mover, free.astype(np.float64), slots.astype(np.float64))
        if costs.min() < costs[free == slots[mover]][0] - 1e-9:
            slots[mover] = free[costs.argmin()]
            moved = True
    return moved


@dataclass(frozen=True, eq=False)
class _Drawing:
    """What stays fixed while components move along their layers: the heights of components, and the edges."""

    heights: Floats  # (component,)
    low: Ints  # (edge,) the component at its lower end
    high: Ints  # (edge,) the component at its upper end
    weights: Floats  # (edge,) the cost of its sideways length, per slot

    def costs(self, mover: int, free: Floats, x: Floats) -> Floats:
        """What each free slot would cost one component, while the others stand at x: (slot,)."""
        touches = (self.low == mover) | (self.high == mover)
        own, rest = np.flatnonzero(touches), np.flatnonzero(~touches)
        neighbours = self.low[own] + self.high[own] - mover  # the other ends of its edges
        # 1. Its edges against the others. Two edges cross if they change sides where both of them pass.
        bottom = np.maximum(self._bottom(own)[:, None], self._bottom(rest))
        top = np.minimum(self._top(own)[:, None], self._top(rest))
        apart = (neighbours[:, None] != self.low[rest]) & (neighbours[:, None] != self.high[rest])
        i, j = np.nonzero(apart & (bottom < top))
        begin, end = (
            self._moving(mover, own[i], y[i, j], free, x) - self._standing(rest[j], y[i, j], x) for y in (bottom, top)
        )
        crossed = (begin * end < 0).sum(1)
        # 2. Its edges under other boxes, and other edges under its box.
        i, boxes = np.nonzero((self._bottom(own)[:, None] < self.heights) & (self.heights < self._top(own)[:, None]))
        under = np.abs(self._moving(mover, own[i], self.heights[boxes], free, x) - x[boxes]) < _HALF_A_BOX
        passing = rest[(self._bottom(rest) < self.heights[mover]) & (self.heights[mover] < self._top(rest))]
        over = np.abs(self._standing(passing, self.heights[[mover]], x) - free[:, None]) < _HALF_A_BOX
        # 3. The sideways length of its edges.
        length = np.abs(free[:, None] - x[neighbours]) @ self.weights[own]
        return crossed + _UNDER_A_BOX * (under.sum(1) + over.sum(1)) + length

    def _bottom(self, edges: Ints) -> Floats:
        return self.heights[self.low[edges]]

    def _top(self, edges: Ints) -> Floats:
        return self.heights[self.high[edges]]

    def _share(self, edges: Ints, y: Floats) -> Floats:
        """How far up these edges the heights y are, 0..1."""
        return (y - self._bottom(edges)) / (self._top(edges) - self._bottom(edges))

    def _standing(self, edges: Ints, y: Floats, x: Floats) -> Floats:
        """The x positions at which these edges pass the heights y."""
        share = self._share(edges, y)
        return (1 - share) * x[self.low[edges]] + share * x[self.high[edges]]

    def _moving(self, mover: int, edges: Ints, y: Floats, free: Floats, x: Floats) -> Floats:
        """The x positions at which edges of one component pass the heights y, for each free slot: (slot, edge)."""
        share = self._share(edges, y)
        own_share = np.where(self.low[edges] == mover, 1 - share, share)
        neighbours = self.low[edges] + self.high[edges] - mover
        return free[:, None] * own_share + (1 - own_share) * x[neighbours]
