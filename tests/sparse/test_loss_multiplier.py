"""The loss multiplier of GECO, against its formula."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gatelens.sparse.sparsify._geco import LossMultiplier


def geco(**changes: float) -> LossMultiplier:
    kind: dict[str, Any] = {"base": 2.0, "target": 0.1, "scale": 0.1, "rate": 0.05, "damping": 0.0, "smoothing": 0.0}
    return LossMultiplier(**{**kind, "low": 0.5, "high": 50.0, **changes})


def test_a_constant_violation_moves_the_logarithm_in_a_line() -> None:
    multiplier = geco(warmup=3)
    for step in range(10):
        assert multiplier.now == pytest.approx(2 * math.exp(0.05 * 0.5 * max(0, step - 3)))
        multiplier.update(0.15)


def test_the_violation_is_averaged() -> None:
    """After a jump from no violation, the average is 1 - smoothing^n, and its sum has a closed form."""
    multiplier = geco(smoothing=0.8, damping=2.0)
    multiplier.update(0.1)
    for _ in range(12):
        multiplier.update(0.2)
    average = 1 - 0.8**12
    total = 12 - 0.8 * (1 - 0.8**12) / (1 - 0.8)
    assert multiplier.violation == pytest.approx(average)
    assert multiplier.base == pytest.approx(2 * math.exp(0.05 * total))
    assert multiplier.now == pytest.approx(2 * math.exp(0.05 * total + 2 * average))


def test_one_bad_batch_hardly_moves_it_and_it_stays_in_its_bounds() -> None:
    multiplier = geco()
    multiplier.update(1e9)
    assert multiplier.now == pytest.approx(2 * math.exp(0.05))
    for _ in range(200):
        multiplier.update(1e9)
    assert multiplier.now == 50
    for _ in range(200):
        multiplier.update(0.0)
    assert multiplier.now == 0.5


def test_damping_calms_the_multiplier() -> None:
    """A loss that falls, late, with the logarithm of the multiplier: without damping it swings for ever."""

    def swing(damping: float) -> float:
        multiplier, loss, losses = geco(rate=0.1, damping=damping, high=1e6), 0.3, []
        for _ in range(400):
            loss += 0.02 * (0.3 - 0.05 * math.log(multiplier.now) - loss)
            multiplier.update(loss)
            losses.append(loss)
        late = losses[100:]
        return max(late) - min(late)

    assert swing(2.0) < 0.5 * swing(0.0)
