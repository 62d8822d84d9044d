"""Causal Head Gating: does a head help the model with a task, hinder it, or not matter?

Gates G multiply the output of every head and are learned, in three fits for each seed: G from a uniform start with no
penalty; then, both starting from G, G+ with a reward for open gates and G- with a reward for closed gates. A head that
the task needs stays open in G-. A head that hinders it is closed even in G+. A head that does not matter follows the
reward. (Nam et al., "Causal Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor

from gatelens.gates.fit_plan import (
    FitSettings,
    Objective,
    Schedule,
    Work,
    check_rates,
    draw_batch,
    uniform_start,
)
from gatelens.gates.fitting import FitNames, fit_gates
from gatelens.gates.response_checks import check_responses, warn_if_unknown
from gatelens.gates.responses import cut, nll
from gatelens.gates.roles import HeadRoles
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses


class HeadGatingSettings(FitSettings):
    """How gates are fitted, three times for each seed.

    The learning rates, the penalty and the clamp are those of the paper. Its sizes are the preset ``published``: 10
    seeds, 500 updates of batches of 64, and seeds that see the examples in different orders. The defaults are smaller.
    """

    penalty: float = Field(0.1, ge=0, description="reward for open (G+) or closed (G-) gates, in nats per logit")
    clamp: float = Field(4.0, gt=0, description="gate logits beyond this are not rewarded further")
    first_rate: tuple[float, float] = Field((0.1, 0.01), description="learning rates of G: start and end")
    second_rate: tuple[float, float] = Field((0.5, 0.1), description="learning rates of G+ and G-: start and end")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "standard": {"seeds": 3, "updates": 40, "batch": 8, "paired": True},
        "quick": {"seeds": 2, "updates": 15, "batch": 4, "paired": True},
        "published": {"seeds": 10, "updates": 500, "batch": 64, "paired": False},
    }

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
    processes = Processes(model.device)
    seeds = processes.share(settings.seeds)
    orders = settings.orders(seeds)
    # 1. G, with no penalty.
    start = uniform_start(model, [settings.seed + seed for seed in seeds])
    names = FitNames("G", [f"gates-{seed}" for seed in seeds], processes.name)
    objective = nll_objective(model, responses, settings, orders, torch.zeros(len(seeds)), context)
    plain, losses = fit_gates(start, objective, Schedule.of(settings, settings.first_rate), names, context)
    # 2. G+ and G-, both from G. They are rows of the same batches.
    penalties = settings.penalty * torch.tensor([1.0] * len(seeds) + [-1.0] * len(seeds))
    names = FitNames("G+ and G-", [f"{sign}-{seed}" for sign in ("plus", "minus") for seed in seeds], processes.name)
    objective = nll_objective(model, responses, settings, [*orders, *orders], penalties, context)
    schedule = Schedule.of(settings, settings.second_rate)
    both, both_losses = fit_gates(torch.cat([plain, plain]), objective, schedule, names, context)
    # 3. The seeds of all processes.
    plus, minus = both.tensor_split(2)
    gates = torch.stack(processes.gather(torch.stack([plain, plus, minus], 1).sigmoid().unbind(), settings.seeds))
    history = torch.stack([losses, *both_losses.tensor_split(2, 1)])  # (fit, update, seed)
    history = torch.stack(processes.gather(history.unbind(-1), settings.seeds), -1)
    return HeadRoles(gates[:, 0], gates[:, 1], gates[:, 2], history)


def nll_objective(
    model: Model,
    task: ResponseTask,
    settings: HeadGatingSettings,
    orders: Sequence[int],
    penalties: Float[Tensor, " row"],
    context: Context,
) -> Objective:
    """What all three fits minimise: the mean over examples of the mean NLL of the target tokens, and a penalty.

    Arguments:
        orders: for each row, the seed of its order of the examples.
        penalties: for each row, the reward for open gates; below 0, for closed gates.
    """
    bfloat16 = use_bfloat16(model.device, settings.autocast)

    def work(number: int, order: int, rows: int) -> Work:
        batch = draw_batch(task, settings.batch, number, order)
        at_once, parts = cut(model, batch, rows, grad=True, context=context)
        return Work(at_once, [partial(_share, part, len(batch.which)) for part in parts])

    def _share(part: ResponseBatch, size: int, gates: Tensor) -> Tensor:
        return nll(model, part, gates, bfloat16).sum(1) / size

    return Objective(work, orders, penalties, settings.clamp)
