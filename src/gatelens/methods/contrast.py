"""Contrastive head gating: gates that keep one data set's responses and lose another's.

The two ask for the same thing in two ways (a relation by instruction, and by examples in context); heads that are open
for the one and closed for the other tell the ways apart. (Nam et al., arXiv 2505.13737.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.fitting import FitSettings, Schedule, check_rates, draw_batch, fit_gates, nll, uniform_logits
from gatelens.gates.responses import check_responses, mean_log_probs, rows_at_once, warn_if_unknown
from gatelens.model import Model
from gatelens.runtime.journal import Journal
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses, split


@dataclass(frozen=True)
class ContrastSettings(FitSettings):
    """How contrastive gates are fitted. A batch has as many examples of each of the two tasks."""

    rate: tuple[float, float] = field(default=(0.1, 0.01), metadata={"help": "learning rate, start and end"})
    held_out: float = field(default=0.25, metadata={"help": "share of the examples kept for the evaluation"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.held_out < 1:
            raise GatelensError(f"held_out is a share between 0 and 1, not {self.held_out}.")
        check_rates(*self.rate)


@dataclass(frozen=True, eq=False)
class Contrast:
    """Gates that keep one task and lose another, and what they do to examples that were not trained on.

    Log-probabilities are of a response, summed over its tokens, mean over held-out examples: (seed,); those of the open
    model are one number.
    """

    gates: Tensor  # (seed, layer, head) in 0..1
    losses: Tensor  # (update, seed)
    keep: Tensor  # (seed,) log-probability of the responses to keep, under the gates
    lose: Tensor  # (seed,) of the responses to lose
    keep_open: float  # with all gates open
    lose_open: float


def fit_contrast(
    model: Model,
    keep: ResponseTask | CircuitTask,
    lose: ResponseTask | CircuitTask,
    settings: ContrastSettings | None = None,
    *,
    journal: Journal | None = None,
) -> Contrast:
    """Fit gates that keep the responses of one task and lose those of the other.

    The loss is ``NLL(keep) + max(0, ceiling - NLL(lose))``, each a mean over examples of the mean NLL per token. The
    ceiling is a blind guess among all tokens: losing an example more than that is not rewarded. Both are evaluated on
    examples that were held out.
    Cost: 2 forward-backwards for each update and seed.
    """
    settings = settings or ContrastSettings()
    journal = journal or Journal()
    wholes = as_responses(keep), as_responses(lose)
    for whole in wholes:
        check_responses(model, whole)
        warn_if_unknown(model, whole, settings.memory_gb)
    (kept_task, keep_test), (lost_task, lose_test) = (hold_out(whole, settings.held_out) for whole in wholes)
    ceiling = math.log(model.hf.config.vocab_size)
    bfloat16 = use_bfloat16(model.device, settings.autocast)
    processes = Processes(model.device)
    mine = processes.share(settings.seeds)
    start = torch.stack([uniform_logits(model, settings.seed + row) for row in range(settings.seeds)])[mine]

    def batches(number: int) -> list[ResponseBatch]:
        return [draw_batch(task, settings.batch, number, settings.seed) for task in (kept_task, lost_task)]

    def loss(number: int, gates: Tensor) -> Tensor:
        # Of each example, so that nothing depends on how examples are split into batches.
        kept, lost = (nll(model, batch, gates, bfloat16) for batch in batches(number))
        return kept.mean(1) + (ceiling - lost).clamp(min=0).mean(1)

    def at_once(number: int) -> int:
        half = settings.memory_gb / 2
        return min(rows_at_once(model, batch, grad=True, memory_gb=half) for batch in batches(number))

    schedule = Schedule(settings.updates, settings.rate, settings.accumulate)
    names = [f"contrast-{row}" for row in mine]
    none = start.new_zeros(len(mine))
    logits, losses = fit_gates(start, loss, at_once, schedule, none, journal, "contrast", names, processes.name)
    gates = processes.gather(logits.sigmoid(), settings.seeds)
    rows = torch.cat([gates, torch.ones_like(gates[:1])])
    kept, lost = (
        mean_log_probs(model, task, rows, batch=settings.batch, memory_gb=settings.memory_gb).to(rows)
        for task in (keep_test, lose_test)
    )
    history = processes.gather(losses.T, settings.seeds).T
    return Contrast(gates, history, kept[:-1], lost[:-1], float(kept[-1]), float(lost[-1]))


def hold_out(task: ResponseTask, held_out: float) -> tuple[ResponseTask, ResponseTask]:
    """The examples to train on, and those that are held out."""
    n = round(len(task) * (1 - held_out))
    if not 0 < n < len(task):
        raise GatelensError(f"{task.name} has {len(task)} examples: too few to hold out {held_out:.0%} of them.")
    return split(task, n)
