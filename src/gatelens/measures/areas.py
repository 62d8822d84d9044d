"""CPR and CMD: the areas by which the MIB circuit track compares methods (Mueller et al., arXiv 2504.13151).

Circuits keep 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50 and 100 % of the gates. CPR is the area under their explained effect,
and CMD the area under ``|1 - effect|``, over the share of gates kept, on a linear axis, by the trapezoid rule. The axis
begins at 0.1 %, so a circuit with effect 1 everywhere has a CPR of 0.999 and a CMD of 0. A circuit that does better
than the model has a larger CPR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor

from gatelens.measures.counts import Interval, Sample
from gatelens.runtime.settings import Settings

MIB_SHARES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of gates that circuits keep."""


@dataclass(frozen=True)
class Area:
    """CPR or CMD, with the 95 % interval of a bootstrap. ``str(area)`` is what tables print.

    Arguments:
        value: the area.
        interval: what resampled prompts (and seeds) give. The ranking is held fixed.
        sample: the prompts.
    """

    value: float
    interval: Interval
    sample: Sample

    def __float__(self) -> float:
        return self.value

    def __str__(self) -> str:
        low, high = self.interval
        has_interval = self.sample.has_interval and low is not None and high is not None
        interval = f"{low:.3f} to {high:.3f}" if has_interval else "no interval"
        return f"{self.value:.3f} ({interval}; {self.sample})"


class AreaColumns(Settings):
    """CPR and CMD as entries of a JSON file or columns of a table."""

    cpr: float | None = Field(default=None, description="MIB's CPR: area under the effect over the share of gates kept")
    cpr_low: float | None = Field(default=None, description="lower end of its 95 % interval")
    cpr_high: float | None = Field(default=None, description="upper end of its 95 % interval")
    cmd: float | None = Field(default=None, description="MIB's CMD: area between the effect and 1")
    cmd_low: float | None = Field(default=None, description="lower end of its 95 % interval")
    cmd_high: float | None = Field(default=None, description="upper end of its 95 % interval")


def area_columns(cpr: Area | None, cmd: Area | None) -> AreaColumns:
    """The columns of both areas, with their intervals if there is more than one prompt."""
    columns: dict[str, float | None] = {}
    for name, area in (("cpr", cpr), ("cmd", cmd)):
        if area is not None:
            low, high = area.interval if area.sample.has_interval else (None, None)
            columns |= {name: area.value, f"{name}_low": low, f"{name}_high": high}
    return AreaColumns(**columns)


def mib_counts(total: int) -> list[int]:
    """How many of all gates each circuit keeps, rounded down as MIB does."""
    return [int(share * total) for share in MIB_SHARES]


def under_effect(effects: Float[Tensor, "draw point"]) -> Float[Tensor, " draw"]:
    """CPR of the effects of the circuits on MIB's grid."""
    return torch.trapezoid(effects.double(), torch.tensor(MIB_SHARES, dtype=torch.float64), dim=-1)


def from_one(effects: Float[Tensor, "draw point"]) -> Float[Tensor, " draw"]:
    """CMD of the effects of the circuits on MIB's grid."""
    return under_effect((1 - effects.double()).abs())


def largest_prefixes(order: Int[Tensor, " gate"], copies: Int[Tensor, " _size"], counts: Sequence[int]) -> list[int]:
    """How many of the best gates fit into each count, if a gate counts as several.

    Arguments:
        order: the positions of the gates from best to worst.
        copies: how often the gate at each position counts.
        counts: the numbers that must not be exceeded, in ascending order.
    """
    sums = copies[order].cumsum(0)
    return torch.searchsorted(sums, torch.tensor(counts), right=True).tolist()
