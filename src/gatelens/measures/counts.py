"""Counts and multipliers as values that always carry their interval and the number of prompts.

Everything that prints a count or a multiplier (command line, page, figures, CSV, summary, demo) prints one of these two
values, so that no place can print a bare number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field
from torch import Tensor

from gatelens.runtime.settings import Settings
from gatelens.runtime.shown import Shown

LEVEL = 0.95
"""The share of resamplings that an interval contains."""


class Interval(NamedTuple):
    """The 95 % interval of a number. An end that is None is open: too many resamplings have no value there.

    Example:
        low, high = curve.count_interval(0.9)
    """

    low: float | None  # the lower end; None: open
    high: float | None  # the upper end; None: open

    @classmethod
    def of(cls, draws: Tensor) -> Interval:
        """The interval between two order statistics of the draws (draw,), which may be infinite.

        Order statistics do not interpolate, so draws that are infinite make an end open and change no other number.
        """
        ordered = draws.sort().values
        outside = int((1 - LEVEL) / 2 * len(ordered))
        ends = ordered[outside].item(), ordered[len(ordered) - 1 - outside].item()
        return cls(*(None if math.isinf(end) else end for end in ends))


@dataclass(frozen=True)
class Sample:
    """The prompts behind a number.

    ``str(sample)`` says whether gates were ranked on other prompts: ``64 held-out prompts``.

    Arguments:
        prompts: prompts for each task seed.
        seeds: task seeds, which have their own prompts.
        ranked_on: other prompts that gates were ranked on, for each task seed; 0: gates were ranked on these prompts.
    """

    prompts: int
    seeds: int = 1
    ranked_on: int = 0

    @property
    def has_interval(self) -> bool:
        """Whether there is anything to resample."""
        return self.prompts * self.seeds > 1

    @property
    def ranking(self) -> str:
        """The prompts that gates were ranked on, in words: ``64 other prompts`` or ``the same prompts``."""
        other = f"{self.ranked_on:,} other prompt{'s' * (self.ranked_on != 1)}"
        return other + " of each seed" * (self.seeds > 1) if self.ranked_on else "the same prompts"

    def __str__(self) -> str:
        prompts = f"{self.prompts:,} {'held-out ' * bool(self.ranked_on)}prompt{'s' * (self.prompts != 1)}"
        return prompts if self.seeds == 1 else f"{self.seeds} seeds of {prompts}"


class CountColumns(Settings):
    """A count as entries of a JSON file or columns of a table."""

    count: int | float | None = Field(default=None, description="gates needed for the threshold; None: never reached")
    count_low: int | None = Field(default=None, description="lower end of the 95 % interval of the count; None: open")
    count_high: int | None = Field(default=None, description="upper end of the 95 % interval of the count; None: open")
    prompts: int | None = Field(default=None, description="prompts that gates were counted on, for each task seed")
    seeds: int | None = Field(default=None, description="task seeds")
    ranked_on: int | None = Field(
        default=None, description="other prompts that gates were ranked on, for each task seed; 0: the same prompts"
    )


class MultiplierColumns(Settings):
    """A multiplier as entries of a JSON file or columns of a table."""

    multiplier: float | None = Field(default=None, description="of a sparse model: dense count / sparse count")
    multiplier_low: float | None = Field(default=None, description="lower end of its 95 % interval; None: open")
    multiplier_high: float | None = Field(default=None, description="upper end of its 95 % interval; None: open")
    paired: bool | None = Field(default=None, description="whether the same prompts were drawn for both models")
    shows_difference: bool | None = Field(default=None, description="whether the interval excludes 1")


@dataclass(frozen=True)
class Count:
    """How many gates explain a share of the effect, with the 95 % interval of a bootstrap.

    ``str(count)`` is what all tables print: ``50 (41 to 63; 64 prompts)``.

    Arguments:
        value: the number of gates; None if the curve does not reach the threshold.
        interval: what resampled prompts (and seeds) give. Its upper end is open if the threshold is not reached in some
            of the resamplings that it must contain.
        sample: the prompts.

    Example:
        count = curve.counted(0.9)
        count.value, count.interval.low, count.interval.high
        print(count)  # 41 (25 to 144; 64 prompts)
    """

    value: int | None
    interval: Interval
    sample: Sample

    def __str__(self) -> str:
        value = "not reached" if self.value is None else f"{self.value:,}"
        return f"{value} ({'; '.join([*self._interval(), str(self.sample)])})"

    def _interval(self) -> list[str]:
        low, high = self.interval
        if not self.sample.has_interval:
            return ["no interval"]
        if high is None:
            return [] if low is None else [f"{low:,.0f} or more"]
        return [f"{low:,.0f} to {high:,.0f}"]

    def columns(self) -> CountColumns:
        """The count as entries of a JSON file or columns of a table."""
        low, high = self.interval if self.sample.has_interval else (None, None)
        return CountColumns(
            count=self.value,
            count_low=None if low is None else round(low),
            count_high=None if high is None else round(high),
            prompts=self.sample.prompts,
            seeds=self.sample.seeds,
            ranked_on=self.sample.ranked_on,
        )


@dataclass(frozen=True, repr=False)
class Multiplier(Shown):
    """Dense count / sparse count, with the 95 % interval of a bootstrap. Above 1, the sparse model needs fewer gates.

    ``str(multiplier)`` is what all tables print: ``1.40x (1.12 to 1.95; 64 prompts)``.

    Arguments:
        ratio: dense count / sparse count; infinite if the sparse model needs no gate.
        interval: what resampled prompts (and seeds) give. An end is open if one of the models does not reach the
            threshold in some of the resamplings that it must contain.
        samples: the prompts of the dense and of the sparse model.
        paired: whether both models had the same prompts, so that the same ones were drawn for both.

    Example:
        ratio = gatelens.multiplier(dense_curve, sparse_curve, at=0.5)
        ratio.ratio, ratio.interval, ratio.shows_difference
    """

    ratio: float
    interval: Interval
    samples: tuple[Sample, Sample]
    paired: bool

    drawn_by = "gatelens.report.plots:plot_multiplier"

    def records(self) -> list[dict[str, Any]]:
        return [self.columns().model_dump()]

    def headline(self) -> str:
        return f"dense count / sparse count: {self}"

    def __float__(self) -> float:
        return self.ratio

    @property
    def shows_difference(self) -> bool:
        """Whether the interval excludes 1. If it does not, the prompts do not show that the models differ."""
        low, high = self.interval
        above, below = low is not None and low > 1, high is not None and high < 1
        return all(sample.has_interval for sample in self.samples) and (above or below)

    @property
    def verdict(self) -> str:
        """What the interval says, in words: ``no difference shown`` if it contains 1, otherwise nothing."""
        return "" if self.shows_difference else "no difference shown"

    @property
    def brief(self) -> str:
        """The multiplier and its interval, for figures, whose caption has the number of prompts."""
        return f"{_decimals(self.ratio)}x ({self._interval()})"

    def __str__(self) -> str:
        samples = dict.fromkeys(map(str, self.samples))
        parts = [self._interval(), " and ".join(samples), *([] if self.paired else ["not paired"])]
        return f"{_decimals(self.ratio)}x ({'; '.join(parts)})" + (f", {self.verdict}" if self.verdict else "")

    def _interval(self) -> str:
        low, high = self.interval
        if not all(sample.has_interval for sample in self.samples):
            return "no interval"
        if low is None:
            return "∞"
        if high is None:
            return f"{_decimals(low)} or more"
        return f"{_decimals(low)} to {_decimals(high)}"

    def columns(self) -> MultiplierColumns:
        """The multiplier as entries of a JSON file or columns of a table."""
        low, high = self.interval if all(sample.has_interval for sample in self.samples) else (None, None)
        return MultiplierColumns(
            multiplier=None if math.isinf(self.ratio) else self.ratio,
            multiplier_low=low,
            multiplier_high=high,
            paired=self.paired,
            shows_difference=self.shows_difference,
        )


def _decimals(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.2f}" if value < 10 else f"{value:,.1f}"


def joint_interval(dense: Tensor, sparse: Tensor) -> Interval:
    """The interval of dense / sparse counts over draws, where an infinite count is one that was not reached.

    A draw in which neither model reaches the threshold says nothing, so it counts as the smallest possible ratio for
    the lower end and as the largest for the upper one.
    """
    ratio = dense / sparse
    undecided = dense.isinf() & sparse.isinf()
    low = Interval.of(ratio.where(~undecided, 0.0)).low
    return Interval(low, Interval.of(ratio.where(~undecided, math.inf)).high)
