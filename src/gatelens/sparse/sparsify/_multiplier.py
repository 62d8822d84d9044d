"""How the weight of the loss, relative to that of the penalty on open edges, follows what is held.

The objective is `loss + penalty / multiplier`. Two things can be held (`hold`):

    loss   The loss stays at its target, with as few open edges as possible (GECO: Rezende and Viola, arXiv
           1810.00597). The multiplier grows while the loss is above the target, and shrinks while it is below.
    keys   The number of open keys per query moves along a line, at the smallest loss. The multiplier shrinks while
           more keys are open than the line says, and grows while fewer are.

In a run that holds all gates open, the penalty has no gradient, and the multiplier stays as it is.

A violation is a number from -1 to 1. Positive violations make the multiplier grow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

FULL_DEVIATION = 0.3  # how far the logarithm of the keys is from its line when it counts as fully violated
LEAST_KEYS = 0.01  # is added to the keys, so that their logarithm stays finite
TEXT_SMOOTHING = 0.05  # share of a new sequence of 256 tokens in the moving average of the loss of a text
TEXT_LENGTH = 256


@dataclass
class Multiplier:
    """A multiplier in log space that follows violations.

    Two measures keep it from diverging and from oscillating. It does not change for `warmup` steps, because at first
    the noise of the gates dominates the loss. And it responds to a violation twice: `base` integrates violations
    slowly, and `now` differs from `base` by the current violation, so that it falls as soon as the violation does (a
    proportional term, as in Stooke et al., arXiv 2007.03964).
    """

    base: float  # the multiplier without its response to the current violation
    rate: float  # largest change of log(base) in a step
    damping: float  # largest distance of log(now) from log(base)
    low: float
    high: float
    warmup: int = 0
    steps: int = 0
    violation: float = 0.0  # of the last step

    def update(self, violation: float) -> None:
        """Take the violation of one step into account."""
        self.violation = violation
        self.steps += 1
        if self.steps > self.warmup:
            self.base = self._clamp(self.base * math.exp(self.rate * violation))

    @property
    def now(self) -> float:
        """The factor of the loss in the next step."""
        if self.steps <= self.warmup:
            return self.base
        return self._clamp(self.base * math.exp(self.damping * self.violation))

    def _clamp(self, value: float) -> float:
        return max(self.low, min(self.high, value))


@dataclass
class HeldLoss:
    """The smoothed violation of `loss <= target`: (loss - target) / scale, clamped to -1..1."""

    target: float
    scale: float  # how far above its target a loss counts as fully violated
    smoothing: float  # share of the past in the moving average, 0..1
    smoothed: float | None = None

    def violation(self, loss: float, keys: float) -> float:
        """Take the loss of one step into account and return the smoothed violation."""
        now = _clamp((loss - self.target) / self.scale)
        self.smoothed = now if self.smoothed is None else self.smoothing * self.smoothed + (1 - self.smoothing) * now
        return self.smoothed

    def watch(self, texts: Mapping[str, float], length: int) -> None:
        """The losses of single texts do not matter here."""


@dataclass
class HeldKeys:
    """How far the smoothed number of open keys per query is from its line, in log space.

    The line begins at the keys of the first step and ends at `keys` after `ramp_steps` steps. It waits while the
    smoothed loss of any text is above `most_loss`; then fewer keys are never asked for, and the loss gets more weight.
    """

    keys: float
    ramp_steps: float
    smoothing: float
    most_loss: float | None = None
    first: float | None = None  # log of the keys of the first step
    smoothed: float = 0.0
    progress: float = 0.0  # 0..1, along the line
    losses: dict[str, float] = field(default_factory=dict)  # smoothed, by text

    def violation(self, loss: float, keys: float) -> float:
        """Take one step into account and return the violation: positive if fewer keys are open than the line says."""
        now = math.log(keys + LEAST_KEYS)
        if self.first is None:
            self.first = self.smoothed = now
        self.smoothed = self.smoothing * self.smoothed + (1 - self.smoothing) * now
        too_much = self._too_much_loss()
        if too_much <= 0:
            self.progress = min(1.0, self.progress + 1 / self.ramp_steps)
        line = self.first + (math.log(self.keys + LEAST_KEYS) - self.first) * self.progress
        deviation = _clamp((line - self.smoothed) / FULL_DEVIATION)
        return deviation if too_much <= 0 else max(deviation, _clamp(too_much / (self.most_loss or 1.0)))

    def watch(self, texts: Mapping[str, float], length: int) -> None:
        """Take the loss of one sequence of some texts into account, by the name of the text."""
        weight = TEXT_SMOOTHING * min(1.0, length / TEXT_LENGTH)
        for name, loss in texts.items():
            before = self.losses.get(name, loss)
            self.losses[name] = before + weight * (loss - before)

    def _too_much_loss(self) -> float:
        """How far the largest loss of a text is above `most_loss`; 0 or less if it is not."""
        if self.most_loss is None or not self.losses:
            return 0.0
        return max(self.losses.values()) - self.most_loss


class HeldOpen:
    """All gates stay open: nothing can be violated."""

    def violation(self, loss: float, keys: float) -> float:
        return 0.0

    def watch(self, texts: Mapping[str, float], length: int) -> None:
        """The losses of single texts do not matter here."""


Held = HeldLoss | HeldKeys | HeldOpen


def state_of(held: Held, multiplier: Multiplier) -> dict[str, Any]:
    """What changes in the course of a run, as JSON."""
    names = ("smoothed", "first", "progress", "losses")
    of_held = {name: getattr(held, name) for name in names if hasattr(held, name)}
    return {"held": of_held, "multiplier": {name: getattr(multiplier, name) for name in ("base", "steps", "violation")}}


def load_state(held: Held, multiplier: Multiplier, state: Mapping[str, Any]) -> None:
    """Continue from what `state_of` returned."""
    for owner, values in ((held, state["held"]), (multiplier, state["multiplier"])):
        for name, value in values.items():
            setattr(owner, name, value)


def _clamp(value: float) -> float:
    return max(-1.0, min(1.0, value))
