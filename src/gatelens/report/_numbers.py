"""How numbers are written on the page and in figures."""

from __future__ import annotations

from torch import Tensor


def short(values: Tensor) -> list[float]:
    """The values with five significant digits, for data that the page reads."""
    return [float(f"{value:.5g}") for value in values.tolist()]


def decimal(value: float | None) -> str:
    """A share or a correlation with two decimals, never as -0.00."""
    return "-" if value is None else f"{round(value, 2) + 0.0:.2f}"
