"""Where a curve needs more points: around the count at a threshold, and between the ends of its interval.

Every point is a circuit to run, so points are added in rounds: each round asks for a few, and the next one knows their
effects. The count is found by cutting the step before it into thirds. The span of the interval is cut at its widest
steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from gatelens.measures.curves import Curve

REFINED_POINTS = 24
"""At most as many circuits are added to a curve."""
ROUNDS = 8
"""Refinement stops after this many rounds, even if neighbours of a very jagged curve still differ by more."""
_SPAN_POINTS = 12  # steps into which the span of the interval is cut


class _Step(NamedTuple):
    """Two neighbouring points: the k that were asked for, and what the circuits kept."""

    start: int
    stop: int
    kept_before: float
    kept: float

    @property
    def width(self) -> float:
        """The ratio of the gates kept, as a logarithm."""
        return math.log(max(self.kept, 1.0) / max(self.kept_before, 1.0))

    def is_fine(self, share: float) -> bool:
        """Whether the points differ by at most this share, or by one gate."""
        difference = self.kept - self.kept_before
        return difference <= max(1.0, share * self.kept) or self.stop - self.start <= 1

    def cut(self, parts: int) -> list[int]:
        """The numbers that cut the step into parts, evenly spaced by their logarithm."""
        first = max(self.start, 1)
        numbers = {round(first * (self.stop / first) ** (part / parts)) for part in range(1, parts)}
        inside = {number for number in numbers if self.start < number < self.stop}
        return sorted(inside or {(self.start + self.stop) // 2})


def refinement(curve: Curve, threshold: float, share: float, most: int = REFINED_POINTS) -> list[int]:
    """The numbers of gates to evaluate next, so that the count and its interval are known more precisely.

    The count is refined until it differs from the point before it by at most ``share`` of itself, or by one gate. The
    span of its interval is refined until none of its steps is wider than a twelfth of it, by the logarithm.

    Arguments:
        most: how many numbers there may be in this and all later rounds. The count comes first.

    Returns:
        New numbers of gates, in ascending order. The list is empty if the curve is fine enough or does not reach the
        threshold.
    """
    point = curve.point_at(threshold)
    if point is None:
        return []
    steps = _steps(curve)
    # 1. The count.
    before = steps[point - 1] if point else None
    more = before.cut(3) if before is not None and not before.is_fine(share) else []
    # 2. The span of its interval, with what the count leaves in this and in later rounds.
    span = _span(curve, steps, point, threshold)
    coarser = max(share, math.exp(sum(step.width for step in span) / _SPAN_POINTS) - 1)
    wide = sorted((step for step in span if step is not before and not step.is_fine(coarser)), key=lambda s: -s.width)
    left = most - (rounds_needed(before, share) * 2 if before is not None else 0)
    more += [number for step in wide for number in step.cut(2)][: max(0, left)]
    return sorted(set(more[:most]))


def most_refined_points(grid: Sequence[int], share: float) -> int:
    """About how many circuits a refinement of this grid adds, for the estimate of the cost."""
    steps = [_Step(a, b, float(a), float(b)) for a, b in pairwise(grid)]
    if not share or not steps:
        return 0
    count = 2 * max(rounds_needed(step, share) for step in steps)
    return min(REFINED_POINTS, count + (_SPAN_POINTS if count else 0), max(0, grid[-1] + 1 - len(grid)))


def rounds_needed(step: _Step, share: float) -> int:
    """How often a step must be cut into thirds until it is fine."""
    if step.is_fine(share):
        return 0
    finest = max(share, 1 / step.kept)
    return math.ceil(math.log(max(step.width / finest, 1.0001)) / math.log(3))


def _steps(curve: Curve) -> list[_Step]:
    kept = curve.kept.tolist()
    return [_Step(*ends) for ends in zip(curve.asked, curve.asked[1:], kept, kept[1:], strict=False)]


def _span(curve: Curve, steps: Sequence[_Step], point: int, threshold: float) -> list[_Step]:
    """The steps from the one before the lower end of the interval to the upper end."""
    low, high = (end if end is None else float(end) for end in curve.count_interval(threshold))
    kept = curve.kept.tolist()
    first = point if low is None else min(point, _point_of(kept, low))
    last = point if high is None else max(point, _point_of(kept, high))
    return list(steps[max(0, first - 1) : last])


def _point_of(kept: Sequence[float], count: float) -> int:
    """The first point that keeps this many gates."""
    return next(i for i, n in enumerate(kept) if n >= count)
