"""GECO: the multiplier of the constraint that a loss stays below its target (Rezende and Viola, arXiv 1810.00597).

The objective is `penalty + multiplier * loss`. The multiplier grows while the loss is above the target and shrinks
while it is below, so that in the end the penalty is as small as the target allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class LossMultiplier:
    """A multiplier in log space that follows the smoothed violation of the constraint.

    The violation is (loss - target) / scale, clamped to -1..1. Two measures keep the multiplier from diverging and from
    oscillating. It does not change for `warmup` steps, because at first the noise of the gates dominates the loss. And
    it responds to a violation twice: `base` integrates violations slowly, and `now` differs from `base` by the current
    violation, so that it falls as soon as the loss does (a proportional term, as in Stooke et al., arXiv 2007.03964).
    """

    base: float  # the multiplier without its response to the current violation
    target: float
    scale: float  # how far above its target a loss counts as fully violated
    rate: float  # largest change of log(base) in a step
    damping: float  # largest distance of log(now) from log(base)
    smoothing: float  # share of the old violation in the moving average, 0..1
    low: float
    high: float
    warmup: int = 0
    steps: int = 0
    violation: float = 0.0  # the moving average, -1..1

    def update(self, loss: float) -> None:
        """Take the loss of one step into account."""
        violation = max(-1.0, min(1.0, (loss - self.target) / self.scale))
        if self.steps:
            violation = self.smoothing * self.violation + (1 - self.smoothing) * violation
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
