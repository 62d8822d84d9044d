"""Causal Head Gating: does a head help the model with a task, hinder it, or not matter?

Gates G multiply the output of every head and are learned, in three fits for each seed: G from a uniform start with no
penalty; then, both starting from G, G+ with a reward for open gates and G- with a reward for closed gates. A head that
the task needs stays open in G-. A head that hinders it is closed even in G+. A head that does not matter follows the
reward. (Nam et al., "Causal Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from pydantic import Field, field_validator
from torch import Tensor

from gatelens.gates.fitting import (
    FitNames,
    FitSettings,
    Objective,
    Schedule,
    check_rates,
    draw_batch,
    fit_gates,
    uniform_start,
)
from gatelens.gates.responses import check_responses, mean_nll, rows_at_once, warn_if_unknown
from gatelens.gates.roles import HeadRoles
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseTask
from gatelens.tasks.batches import as_responses


class HeadGatingSettings(FitSettings):
    """How gates are fitted, three times for each seed. The defaults are those of the paper."""

    penalty: float = Field(0.1, ge=0, description="reward for open (G+) or closed (G-) gates, in nats per logit")
    clamp: float = Field(4.0, gt=0, description="gate logits beyond this are not rewarded further")
    first_rate: tuple[float, float] = Field((0.1, 0.01), description="learning rates of G: start and end")
    second_rate: tuple[float, float] = Field((0.5, 0.1), description="learning rates of G+ and G-: start and end")

    _check_rates = field_validator("first_rate", "second_rate")(check_rates)


def fit_head_gates(
    model: Model,
    task: ResponseTask | CircuitTask,
    settings: HeadGatingSettings | None = None,
    *,
    context: Context | None = None,
) -> HeadRoles:
    """Find the role of every head in giving the responses of a task.

    With several processes (`accelerate launch`), every process fits its share of the seeds and returns all of them.

    Example:
        roles = gatelens.fit_head_gates(model, task, gatelens.HeadGatingSettings(seeds=10))

    Arguments:
        task: prompts with target responses. The response of a circuit task is its answer, or any of its answers if
            several are right.
        context: the memory budget, and where fits are saved so that a killed run resumes.

    Returns:
        The fitted gates and the scores of each kind. Cost: 3 x updates forward-backwards for each seed.
    """
    settings = settings or HeadGatingSettings()
    context = context or Context()
    responses = as_responses(task)
    check_responses(model, responses)
    warn_if_unknown(model, responses, context)
    fit = _Fit(model, responses, settings, context, use_bfloat16(model.device, settings.autocast))
    processes = Processes(model.device)
    seeds = processes.share(settings.seeds)
    # 1. G, with no penalty.
    start = uniform_start(model, [settings.seed + seed for seed in seeds])
    names = FitNames("G", [f"gates-{seed}" for seed in seeds], processes.name)
    plain, losses = fit.run(start, settings.first_rate, torch.zeros(len(seeds)), names)
    # 2. G+ and G-, both from G. They are rows of the same batches.
    penalties = settings.penalty * torch.tensor([1.0] * len(seeds) + [-1.0] * len(seeds))
    names = FitNames("G+ and G-", [f"{sign}-{seed}" for sign in ("plus", "minus") for seed in seeds], processes.name)
    both, both_losses = fit.run(torch.cat([plain, plain]), settings.second_rate, penalties, names)
    # 3. The seeds of all processes.
    plus, minus = both.tensor_split(2)
    gates = processes.gather(torch.stack([plain, plus, minus], 1).sigmoid(), settings.seeds)
    history = torch.stack([losses, *both_losses.tensor_split(2, 1)])  # (fit, update, seed)
    history = processes.gather(history.permute(2, 0, 1), settings.seeds).permute(1, 2, 0)
    return HeadRoles(gates[:, 0], gates[:, 1], gates[:, 2], history)


@dataclass(frozen=True)
class _Fit:
    """What the three fits have in common."""

    model: Model
    task: ResponseTask
    settings: HeadGatingSettings
    context: Context
    bfloat16: bool

    def run(
        self, start: Tensor, rates: tuple[float, float], penalties: Tensor, names: FitNames
    ) -> tuple[Tensor, Tensor]:
        """Gate logits after all updates (row, layer, head), and the losses (update, row)."""
        objective = Objective(self._loss, self._rows_at_once, penalties, self.settings.clamp)
        schedule = Schedule(self.settings.updates, rates, self.settings.accumulate)
        return fit_gates(start, objective, schedule, names, self.context)

    def _loss(self, number: int, gates: Tensor) -> Tensor:
        batch = draw_batch(self.task, self.settings.batch, number, self.settings.seed)
        return mean_nll(self.model, batch, gates, self.bfloat16)

    def _rows_at_once(self, number: int) -> int:
        batch = draw_batch(self.task, self.settings.batch, number, self.settings.seed)
        return rows_at_once(self.model, batch, grad=True, context=self.context)
