"""UGS: uniform gradient sampling. Learn which gates to keep open, with a price for each open gate.

Each gate has a chance p = sigmoid(parameter) of being open. In every update it is drawn from a mixture: with
probability p (1 - p) it is uniform in (0, 1), and otherwise it is 1 or 0, so that its mean is p. Only uniform gates
pass gradients to their parameters, with a factor of 1. If the loss is linear in each gate, the expected gradient is
that of the expected loss with gates that are 1 with probability p and otherwise 0. The loss is the KL divergence from
the clean run, plus the price times the expected number of open gates. (Li and Janson, arXiv 2409.09951, with corrupt
values as in MIB, arXiv 2504.13151. Their released code multiplies the gradient by p (1 - p) once more, and has a
penalty on nodes, which is left out.)
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from gatelens.gates.learning import GateRule, LearningSettings, learn_gates
from gatelens.gates.level import Level, S
from gatelens.methods.registry import Method, MethodSettings, learning_price, register
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.tasks.base import CircuitTask

_OPEN, _WARM = 1.0, 2.0  # the parameters that gates start with: all open, or (minus) that of the best gates


class UgsSettings(LearningSettings, MethodSettings):
    """Settings of uniform gradient sampling."""

    rate: float = Field(default=0.05, gt=0, description="learning rate of the gates")
    price: float = Field(default=1e-3, ge=0, description="what each open gate costs, in nats of KL divergence")


def sample_uniform_gradients(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    settings: UgsSettings | None = None,
    *,
    context: Context | None = None,
) -> S:
    """Scores of gates that were learned by uniform gradient sampling (`learn_gates` says what a score is).

    Returns:
        Scores of the level. Cost: as that of edge pruning.
    """
    settings = settings or UgsSettings()

    def penalty(parameters: Tensor, multipliers: Tensor, progress: float) -> Tensor:
        return settings.price * parameters.sigmoid().sum()

    rule = GateRule(
        draw_mixture, penalty, rate=settings.rate, betas=(0.9, 0.995), open_start=_OPEN, warm_start=_WARM, clip=5.0
    )
    return learn_gates(level, model, task, rule, settings, "ugs", context)


def draw_mixture(parameters: Tensor, uniform: Tensor) -> Tensor:
    """Gates that are 1, 0 or, with probability p (1 - p), uniform between them. Only the latter pass gradients."""
    chance = parameters.detach().sigmoid()
    window = chance * (1 - chance)
    gates = 0.5 - (uniform - chance) / window
    inside = (gates > 0) & (gates < 1)
    return gates.clamp(0, 1) + inside * (parameters - parameters.detach())  # the bracket is 0: a gradient of 1


UGS = register(
    Method(
        name="ugs",
        score=sample_uniform_gradients,
        price=learning_price,
        paper="Li and Janson, arXiv 2409.09951",
        help="gates are learned, with a price for each open gate",
        levels=("heads", "edges", "attention"),
        settings=UgsSettings,
    )
)
