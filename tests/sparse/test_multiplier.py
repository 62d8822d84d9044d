"""The multiplier of the loss and what it holds, against their formulas."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gatelens.sparse.sparsify._multiplier import HeldKeys, HeldLoss, Multiplier, load_state, state_of


class Geco:
    """A multiplier that holds the loss at 0.1."""

    def __init__(self, smoothing: float = 0.0, **changes: float) -> None:
        kind: dict[str, Any] = {"base": 2.0, "rate": 0.05, "damping": 0.0, "low": 0.5, "high": 50.0}
        self.multiplier = Multiplier(**{**kind, **changes})
        self.held = HeldLoss(target=0.1, scale=0.1, smoothing=smoothing)

    def update(self, loss: float) -> None:
        self.multiplier.update(self.held.violation(loss, keys=1.0))

    @property
    def now(self) -> float:
        return self.multiplier.now


def test_a_constant_violation_moves_the_logarithm_in_a_line() -> None:
    geco = Geco(warmup=3)
    for step in range(10):
        assert geco.now == pytest.approx(2 * math.exp(0.05 * 0.5 * max(0, step - 3)))
        geco.update(0.15)


def test_the_violation_is_averaged() -> None:
    """After a jump from no violation, the average is 1 - smoothing^n, and its sum has a closed form."""
    geco = Geco(smoothing=0.8, damping=2.0)
    geco.update(0.1)
    for _ in range(12):
        geco.update(0.2)
    average = 1 - 0.8**12
    total = 12 - 0.8 * (1 - 0.8**12) / (1 - 0.8)
    assert geco.multiplier.violation == pytest.approx(average)
    assert geco.multiplier.base == pytest.approx(2 * math.exp(0.05 * total))
    assert geco.now == pytest.approx(2 * math.exp(0.05 * total + 2 * average))


def test_one_bad_batch_hardly_moves_it_and_it_stays_in_its_bounds() -> None:
    geco = Geco()
    geco.update(1e9)
    assert geco.now == pytest.approx(2 * math.exp(0.05))
    for _ in range(200):
        geco.update(1e9)
    assert geco.now == 50
    for _ in range(200):
        geco.update(0.0)
    assert geco.now == 0.5


def test_keys_follow_a_line_in_their_logarithm() -> None:
    """Keys that stay where they were are above the line, which falls by the same factor in each step."""
    held = HeldKeys(keys=1.0, ramp_steps=10, smoothing=0.0)
    first, last = math.log(8.01), math.log(1.01)
    for step in range(1, 15):
        line = first + (last - first) * min(1.0, step / 10)
        assert held.violation(loss=0.0, keys=8.0) == pytest.approx(max(-1.0, (line - first) / 0.3))
    assert held.violation(loss=0.0, keys=0.9) == pytest.approx((last - math.log(0.91)) / 0.3)  # fewer keys than asked


def test_the_line_waits_for_the_loss() -> None:
    held = HeldKeys(keys=1.0, ramp_steps=10, smoothing=0.0, most_loss=0.2)
    held.watch({"novels": 0.1, "code": 0.15}, 256)
    held.violation(loss=0.0, keys=8.0)
    assert held.progress == pytest.approx(0.1)
    for _ in range(20):
        held.watch({"code": 0.35}, 128)  # weights a sequence of half the length by half
    assert held.losses["code"] == pytest.approx(0.35 - 0.2 * (1 - 0.025) ** 20)
    violation = held.violation(loss=0.0, keys=8.0)
    assert held.progress == pytest.approx(0.1)  # it waits
    assert violation == pytest.approx((held.losses["code"] - 0.2) / 0.2)  # and the loss gets more weight


def test_a_multiplier_brings_keys_to_their_line() -> None:
    """Keys whose logarithm follows that of the multiplier, late, end where the line does."""
    multiplier = Multiplier(base=16.0, rate=0.05, damping=0.5, low=2.5, high=1000.0)
    held = HeldKeys(keys=1.0, ramp_steps=200, smoothing=0.8)
    log_keys = 2.0
    for _ in range(400):
        log_keys += 0.1 * (1.5 * math.log(multiplier.now / 10) - log_keys)
        multiplier.update(held.violation(0.0, math.exp(log_keys)))
    assert math.exp(log_keys) == pytest.approx(1.0, rel=0.05)


def test_what_is_held_is_saved_as_json() -> None:
    def advance(held: HeldKeys, multiplier: Multiplier, steps: int) -> None:
        for step in range(steps):
            held.watch({"novels": 0.1 * step}, 64)
            multiplier.update(held.violation(0.1, 5.0 - 0.2 * step))

    def fresh() -> tuple[HeldKeys, Multiplier]:
        held = HeldKeys(keys=1.0, ramp_steps=10, smoothing=0.8, most_loss=0.3)
        return held, Multiplier(base=16.0, rate=0.05, damping=0.5, low=2.5, high=1000.0)

    whole, halves = fresh(), fresh()
    advance(*whole, steps=4)
    load_state(*halves, json.loads(json.dumps(state_of(*whole))))
    advance(*whole, steps=3)
    advance(*halves, steps=3)
    assert halves == whole


def test_damping_calms_the_multiplier() -> None:
    """A loss that falls, late, with the logarithm of the multiplier: without damping it swings for ever."""

    def swing(damping: float) -> float:
        geco, loss, losses = Geco(rate=0.1, damping=damping, high=1e6), 0.3, []
        for _ in range(400):
            loss += 0.02 * (0.3 - 0.05 * math.log(geco.now) - loss)
            geco.update(loss)
            losses.append(loss)
        late = losses[100:]
        return max(late) - min(late)

    assert swing(2.0) < 0.5 * swing(0.0)
