"""How numbers are written on the page and in figures."""

from __future__ import annotations

import math

from torch import Tensor


def short(values: Tensor) -> list[float]:
    """The values with five significant digits, for data that the page reads."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def count(value: float | None) -> str:
    """A number of gates; None if the curve does not reach the threshold."""
    return "not reached" if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """A share or a correlation with two decimals, never as -0.00."""
    return "-" if value is None else f"{round(value, 2) + 0.0:.2f}"


def times(ratio: float | None) -> str:
    """A multiplier."""
    return "-" if ratio is None else "∞x" if math.isinf(ratio) else f"{ratio:.1f}x"
