"""Contrastive head gating: gates that keep the responses of one task and lose those of another.

Both tasks ask for the same thing in different ways: for example, one asks for the opposite of a word by an instruction,
the other by examples in the prompt. The gates show which heads only one of the two ways needs. (Nam et al., "Causal
Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

import math

import torch
from pydantic import Field, field_validator
from torch import Tensor

from gatelens.errors import GatelensError
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
from gatelens.gates.responses import check_responses, mean_log_probs, nll, rows_at_once, warn_if_unknown
from gatelens.gates.roles import Contrast
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses, split


class ContrastSettings(FitSettings):
    """How contrastive gates are fitted. A batch has ``batch`` examples of each of the two tasks."""

    rate: tuple[float, float] = Field((0.1, 0.01), description="learning rates: start and end")
    held_out: float = Field(0.25, gt=0, lt=1, description="share of the examples that are held out for evaluation")

    _check_rates = field_validator("rate")(check_rates)


def fit_contrast(
    model: Model,
    keep: ResponseTask | CircuitTask,
    lose: ResponseTask | CircuitTask,
    settings: ContrastSettings | None = None,
    *,
    context: Context | None = None,
) -> Contrast:
    """Fit gates that keep the responses of one task and lose those of another, and evaluate them on held-out examples.

    The loss is ``NLL(keep) + max(0, ceiling - NLL(lose))``, each a mean over examples of the mean NLL per token. The
    ceiling is the NLL of a uniform guess among all tokens: an example that is lost beyond it is not rewarded further.

    Arguments:
        keep: the task whose responses are kept.
        lose: the task whose responses are lost.
        context: the memory budget, and where fits are saved so that a killed run resumes.

    Returns:
        The gates and their effect. Cost: 2 forward-backwards for each update and seed.
    """
    settings = settings or ContrastSettings()
    context = context or Context()
    tasks = as_responses(keep), as_responses(lose)
    for task in tasks:
        check_responses(model, task)
        warn_if_unknown(model, task, context)
    (keep_train, keep_test), (lose_train, lose_test) = (hold_out(task, settings.held_out) for task in tasks)
    # 1. One fit for each seed of this process.
    processes = Processes(model.device)
    seeds = processes.share(settings.seeds)
    start = uniform_start(model, [settings.seed + seed for seed in seeds])
    schedule = Schedule(settings.updates, settings.rate, settings.accumulate)
    names = FitNames("contrast", [f"contrast-{seed}" for seed in seeds], processes.name)
    objective = _objective(model, (keep_train, lose_train), settings, len(seeds), context)
    logits, losses = fit_gates(start, objective, schedule, names, context)
    # 2. The seeds of all processes, on held-out examples; the last row has all gates open.
    gates = processes.gather(logits.sigmoid(), settings.seeds)
    history = processes.gather(losses.T, settings.seeds).T
    evaluated = torch.cat([gates, torch.ones_like(gates[:1])])
    keep_test_log_probs, lose_test_log_probs = (
        mean_log_probs(model, task, evaluated, batch=settings.batch, context=context).to(evaluated)
        for task in (keep_test, lose_test)
    )
    return Contrast(
        gates,
        history,
        keep=keep_test_log_probs[:-1],
        lose=lose_test_log_probs[:-1],
        keep_open=float(keep_test_log_probs[-1]),
        lose_open=float(lose_test_log_probs[-1]),
    )


def _objective(
    model: Model, tasks: tuple[ResponseTask, ResponseTask], settings: ContrastSettings, rows: int, context: Context
) -> Objective:
    """The loss of `fit_contrast`, without a penalty.

    Arguments:
        tasks: the examples to keep and to lose.
        rows: how many rows are fitted.
    """
    bfloat16 = use_bfloat16(model.device, settings.autocast)
    ceiling = math.log(model.hf.config.vocab_size)
    half = context.with_memory(context.memory_gb / 2)  # a row holds the activations of two batches

    def batches(number: int) -> list[ResponseBatch]:
        return [draw_batch(task, settings.batch, number, settings.seed) for task in tasks]

    def loss(number: int, gates: Tensor) -> Tensor:
        # The ceiling is applied to each example, so that nothing depends on how examples are split into batches.
        keep_nll, lose_nll = (nll(model, batch, gates, bfloat16) for batch in batches(number))
        return keep_nll.mean(1) + (ceiling - lose_nll).clamp(min=0).mean(1)

    def at_once(number: int) -> int:
        return min(rows_at_once(model, batch, grad=True, context=half) for batch in batches(number))

    return Objective(loss, at_once, penalties=torch.zeros(rows))


def hold_out(task: ResponseTask, share: float) -> tuple[ResponseTask, ResponseTask]:
    """Split a task into the examples to fit on and those to hold out.

    Arguments:
        share: how many examples are held out, as a share between 0 and 1.
    """
    n = round(len(task) * (1 - share))
    if not 0 < n < len(task):
        raise GatelensError(
            f"{task.name} has {len(task)} examples, which are too few to hold out {share:.0%} of them: give it more."
        )
    return split(task, n)
