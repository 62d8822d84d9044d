"""Edge pruning: learn which gates to keep open, with a target for their number.

Gates are drawn from the hard-concrete distribution (Louizos et al., arXiv 1712.01312): with u uniform in (0, 1) and a
parameter a for each gate,

    gate = clamp(1.2 sigmoid((log u - log(1 - u) + a) / (2/3)) - 0.1, 0, 1)

which is exactly 0 or 1 much of the time and has a gradient otherwise. The loss is the KL divergence from the clean run,
plus ``l1 (s - t) + l2 (s - t)^2``, where s is the expected share of closed gates and t its target. Gates minimise the
loss, and the two Lagrange multipliers maximise it. The target moves from the share at the start to the asked one.
(Bhaskar, Wettig, Friedman and Chen, arXiv 2406.16778. Their gates on whole nodes are left out.)
"""

from __future__ import annotations

import math

import torch
from pydantic import Field
from torch import Tensor

from gatelens.gates.learning import GateRule, LearningSettings, learn_gates
from gatelens.gates.level import Level, S
from gatelens.methods.registry import Method, MethodSettings, learning_price, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

_TEMPERATURE, _LOW, _HIGH = 2 / 3, -0.1, 1.1
_OPEN, _WARM = 10.0, 2.0  # the parameters that gates start with: all open, or (minus) that of the best gates


class EdgePruningSettings(LearningSettings, MethodSettings):
    """Settings of edge pruning."""

    rate: float = Field(default=0.2, gt=0, description="learning rate of the gates")
    multiplier_rate: float = Field(default=0.4, gt=0, description="learning rate of the Lagrange multipliers")
    ramp: float = Field(default=0.5, ge=0, le=1, description="share of the updates in which the target is reached")


def prune_edges(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    settings: EdgePruningSettings | None = None,
    *,
    context: Context | None = None,
) -> S:
    """Scores of gates that were learned by edge pruning (`learn_gates` says what a score is).

    Example:
        scores = prune_edges(EDGES, model, task, EdgePruningSettings(share=0.02))

    Returns:
        Scores of the level. Cost: 2.5 forward-backward passes of a batch for each update at the level of edges, 1 at
        others; and EAP-IG for the warm start.
    """
    settings = settings or EdgePruningSettings()
    return learn_gates(level, model, task, _rule(settings), settings, "edge-pruning", context)


def draw_hard_concrete(parameters: Tensor, uniform: Tensor) -> Tensor:
    """Gates from 0 to 1, many of them exactly 0 or 1, with gradients with respect to the parameters."""
    concrete = torch.sigmoid((uniform.logit() + parameters) / _TEMPERATURE)
    return (_LOW + (_HIGH - _LOW) * concrete).clamp(0, 1)


def open_chance(parameters: Tensor) -> Tensor:
    """The probability that a drawn gate is above 0."""
    return torch.sigmoid(parameters - _TEMPERATURE * math.log(-_LOW / _HIGH))


def _rule(settings: EdgePruningSettings) -> GateRule:
    opened = open_chance(torch.tensor([_OPEN, _WARM, -_WARM]))
    start = float(opened[0])
    if settings.warm_start:
        start = float(settings.share * opened[1] + (1 - settings.share) * opened[2])

    def penalty(parameters: Tensor, multipliers: Tensor, progress: float) -> Tensor:
        ramp = min(1.0, progress / settings.ramp) if settings.ramp else 1.0
        target = start + ramp * (settings.share - start)
        excess = target - open_chance(parameters).mean()  # of closed gates: their share minus its target
        return multipliers[0] * excess + multipliers[1] * excess**2

    return GateRule(
        draw_hard_concrete,
        penalty,
        rate=settings.rate,
        n_multipliers=2,
        multiplier_rate=settings.multiplier_rate,
        open_start=_OPEN,
        warm_start=_WARM,
    )


EDGE_PRUNING = register(
    Method(
        name="edge-pruning",
        score=prune_edges,
        price=learning_price,
        paper="Bhaskar et al., arXiv 2406.16778",
        help="gates are learned, with a target share of open gates",
        levels=("heads", "edges", "attention"),
        settings=EdgePruningSettings,
    )
)
