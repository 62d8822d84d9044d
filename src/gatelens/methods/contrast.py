"""Contrastive head gating: gates that keep the responses of one task and lose those of another.

Both tasks ask for the same thing in different ways: for example, one asks for the opposite of a word by an instruction,
the other by examples in the prompt. The gates show which heads only one of the two ways needs. (Nam et al., "Causal
Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from pydantic import Field, field_validator
from torch import Tensor

from gatelens.errors import GatelensError
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
from gatelens.gates.responses import cut_pairs, nll, score_responses
from gatelens.gates.roles import Contrast, ContrastAccuracy
from gatelens.model import Model
from gatelens.runtime.context import Context
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses, split


class ContrastLossSettings(FitSettings):
    """How contrastive gates are fitted. A batch has ``batch`` examples of each of the two tasks.

    The defaults but for the sizes are those of the paper; its sizes are the preset ``published``.
    """

    objective: Literal["difference", "hinge"] = Field(
        "difference", description="the published loss, or a hinge at the NLL of a blind guess (`fit_contrast`)"
    )
    margin: float = Field(5.0, gt=0, description="the published loss: a larger difference is not rewarded, in nats")
    penalty: float = Field(0.1, ge=0, description="the published loss: reward for open gates, in nats per logit")
    clamp: float = Field(4.0, gt=0, description="gate logits beyond this are not rewarded further")
    rate: tuple[float, float] = Field((0.1, 0.01), description="learning rates: start and end")

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "standard": {"seeds": 3, "updates": 40, "batch": 8, "paired": True},
        "quick": {"seeds": 2, "updates": 15, "batch": 4, "paired": True},
        "published": {"seeds": 1, "updates": 500, "batch": 64},
    }

    _check_rates = field_validator("rate")(check_rates)


class ContrastSettings(ContrastLossSettings):
    """How contrastive gates of two tasks are fitted and evaluated."""

    held_out: float = Field(0.25, gt=0, lt=1, description="share of the examples that are held out for evaluation")


def fit_contrast(
    model: Model,
    keep: ResponseTask | CircuitTask,
    lose: ResponseTask | CircuitTask,
    settings: ContrastSettings | None = None,
    *,
    context: Context | None = None,
) -> Contrast:
    """Fit gates that keep the responses of one task and lose those of another, and evaluate them on held-out examples.

    Both losses are means over examples of the mean NLL per token. The published loss, ``difference``, is ``NLL(keep) -
    NLL(lose)``. Where the response to lose is less probable than the response to keep by more than the margin, the
    difference counts as minus the margin, and only NLL(keep) has a gradient, as in the authors' code. Example i of one
    task is compared with example i of the other. Open gates are rewarded. The ``hinge`` is ``NLL(keep) + max(0, ceiling
    - NLL(lose))`` without a reward, with the NLL of a uniform guess among all tokens as the ceiling.

    Arguments:
        keep: the task whose responses are kept.
        lose: the task whose responses are lost.
        context: the memory budget, and where fits are saved so that a killed run resumes.

    Returns:
        The gates and their effect. Cost: 2 forward-backwards for each update and seed.

    Example:
        instructions, examples = gatelens.tasks.contrast(model, n=16)
        contrast = gatelens.fit_contrast(model, instructions, examples, gatelens.ContrastSettings.preset("quick"))
    """
    settings = settings or ContrastSettings()
    context = context or Context()
    tasks = as_responses(keep), as_responses(lose)
    for task in tasks:
        check_responses(model, task)
    (keep_train, keep_test), (lose_train, lose_test) = (hold_out(task, settings.held_out) for task in tasks)
    for task in tasks:
        warn_if_unknown(model, task, context)
    gates, losses = fit_contrast_gates(model, keep_train, lose_train, settings, context=context)
    return evaluate_contrast(model, keep_test, lose_test, gates, losses, batch=settings.batch, context=context)


def fit_contrast_gates(
    model: Model, keep: ResponseTask, lose: ResponseTask, settings: ContrastLossSettings, *, context: Context
) -> tuple[Float[Tensor, "seed layer head"], Float[Tensor, "update seed"]]:
    """Fit contrastive gates on all examples of both tasks.

    Arguments:
        keep: the task whose responses are kept.
        lose: the task whose responses are lost. It has as many examples, in the same order.

    Returns:
        The gates, and the loss of every update.
    """
    if len(keep) != len(lose):
        raise GatelensError(
            f"{keep.name} has {len(keep)} examples to keep and {lose.name} has {len(lose)} to lose: give both the same "
            "number."
        )
    processes = Processes(model.device)
    seeds = processes.share(settings.seeds)
    start = uniform_start(model, [settings.seed + seed for seed in seeds])
    names = FitNames("contrast", [f"contrast-{seed}" for seed in seeds], processes.name)
    objective = _objective(model, (keep, lose), settings, settings.orders(seeds), context)
    logits, losses = fit_gates(start, objective, Schedule.of(settings, settings.rate), names, context)
    gates, history = (processes.gather(own.unbind(), settings.seeds) for own in (logits.sigmoid(), losses.T))
    return torch.stack(gates), torch.stack(history, -1)


def evaluate_contrast(
    model: Model,
    keep: ResponseTask,
    lose: ResponseTask,
    gates: Float[Tensor, "seed layer head"],
    losses: Float[Tensor, "update seed"],
    *,
    batch: int = 16,
    context: Context,
) -> Contrast:
    """The effect of contrastive gates on examples that they were not fitted on. Cost: 1 forward for each row.

    Arguments:
        keep, lose: the held-out examples.
        gates, losses: what `fit_contrast_gates` returned.
        batch: examples in a batch.
    """
    rows = torch.cat([gates, torch.ones_like(gates[:1])])  # the last row has all gates open
    kept, lost = (score_responses(model, task, rows, batch=batch, context=context) for task in (keep, lose))
    keep_log_probs, lose_log_probs = (scores.log_probs.mean(1).to(gates) for scores in (kept, lost))
    return Contrast(
        gates,
        losses,
        keep=keep_log_probs[:-1],
        lose=lose_log_probs[:-1],
        keep_open=float(keep_log_probs[-1]),
        lose_open=float(lose_log_probs[-1]),
        accuracy=ContrastAccuracy(
            keep=kept.accuracy[:-1],
            lose=lost.accuracy[:-1],
            keep_open=float(kept.accuracy[-1]),
            lose_open=float(lost.accuracy[-1]),
        ),
    )


def _objective(
    model: Model,
    tasks: tuple[ResponseTask, ResponseTask],
    settings: ContrastLossSettings,
    orders: Sequence[int],
    context: Context,
) -> Objective:
    """The loss of `fit_contrast`.

    Arguments:
        tasks: the examples to keep and to lose.
        orders: for each row, the seed of its order of the examples.
    """
    bfloat16 = use_bfloat16(model.device, settings.autocast)
    ceiling = math.log(model.hf.config.vocab_size)
    half = context.with_memory(context.memory_gb / 2)  # a row holds the activations of two batches
    is_published = settings.objective == "difference"

    def work(number: int, order: int, rows: int) -> Work:
        keep, lose = (draw_batch(task, settings.batch, number, order) for task in tasks)
        at_once, parts = cut_pairs(model, keep, lose, rows, context=half)
        return Work(at_once, [partial(share, *part, len(keep.which)) for part in parts])

    def share(keep: ResponseBatch, lose: ResponseBatch, size: int, gates: Tensor) -> Tensor:
        # Both losses are those of single examples, so that nothing depends on how examples are split into parts.
        kept, lost = (nll(model, batch, gates, bfloat16) for batch in (keep, lose))
        if is_published:
            losses = kept - torch.minimum(lost, kept.detach() + settings.margin)
        else:
            losses = kept + (ceiling - lost).clamp(min=0)
        return losses.sum(1) / size

    penalty = settings.penalty if is_published else 0.0
    return Objective(work, orders, torch.full((len(orders),), penalty), settings.clamp)


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
