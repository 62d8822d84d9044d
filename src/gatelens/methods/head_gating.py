"""Causal Head Gating: does a head help, hinder, or not matter?

Gates G multiply every head's output and are learned, three times for each seed: G from a uniform start with no penalty;
then, both starting from it, G+, rewarded for open gates, and G-, rewarded for closed ones. A head that is needed stays
open in G-; one that hinders is closed even in G+; one that does not matter follows the reward.
(Nam et al., "Causal Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.fitting import FitSettings, Schedule, check_rates, draw_batch, fit_gates, mean_nll, uniform_logits
from gatelens.gates.responses import check_responses, rows_at_once, warn_if_unknown
from gatelens.model import Model
from gatelens.runtime.journal import Journal
from gatelens.runtime.precision import use_bfloat16
from gatelens.runtime.processes import Processes
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask
from gatelens.tasks.batches import as_responses

KINDS = ("facilitation", "irrelevance", "interference")


@dataclass(frozen=True)
class HeadGatingSettings(FitSettings):
    """How gates are fitted, three times for each seed. The defaults are the paper's."""

    penalty: float = field(
        default=0.1, metadata={"help": "reward for open (G+) or closed (G-) gates, in nats per logit"}
    )
    clamp: float = field(default=4.0, metadata={"help": "gate logits beyond this are not rewarded further"})
    first_rate: tuple[float, float] = field(default=(0.1, 0.01), metadata={"help": "learning rate of G, start and end"})
    second_rate: tuple[float, float] = field(default=(0.5, 0.1), metadata={"help": "of G+ and G-, start and end"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.penalty < math.inf and 0 < self.clamp < math.inf):
            raise GatelensError("penalty is 0 or more, clamp is above 0.")
        check_rates(*self.first_rate, *self.second_rate)


@dataclass(frozen=True, eq=False)
class HeadRoles:
    """The role of every head: three scores in 0..1 for each seed, from the fitted gates; (seed, layer, head)."""

    gates: Tensor  # G: fitted with no penalty
    plus: Tensor  # G+: rewarded for open gates
    minus: Tensor  # G-: rewarded for closed gates
    losses: Tensor  # (fit, update, seed): mean NLL of the target tokens; fits are G, G+, G-

    @property
    def facilitation(self) -> Tensor:
        """Open even when closing is rewarded: the head is needed."""
        return self.minus

    @property
    def irrelevance(self) -> Tensor:
        """Open or closed as rewarded: the head does not matter."""
        return self.plus * (1 - self.minus)

    @property
    def interference(self) -> Tensor:
        """Closed even when opening is rewarded: the head hinders."""
        return 1 - self.plus

    def kind(self, name: str) -> Tensor:
        if name not in KINDS:
            raise GatelensError(f"no kind '{name}': heads have {', '.join(KINDS)}.")
        scores: Tensor = getattr(self, name)
        return scores

    def is_kind(self, name: str) -> Tensor:
        """Which heads are of a kind, at or above 0.5: bool, (seed, layer, head)."""
        return self.kind(name) >= 0.5

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind the share of heads at or above 0.5 in all seeds, and in any seed."""
        marked = {name: self.is_kind(name) for name in KINDS}
        return {
            name: {"all seeds": float(m.all(0).float().mean()), "any seed": float(m.any(0).float().mean())}
            for name, m in marked.items()
        }


def fit_head_gates(
    model: Model,
    task: ResponseTask | CircuitTask,
    settings: HeadGatingSettings | None = None,
    *,
    journal: Journal | None = None,
) -> HeadRoles:
    """The role of every head in giving the task's responses. Cost: 3 x updates forward-backwards for each seed.

    A circuit task counts as one whose response is its answer, or any of its answers where there are several. Started by
    `accelerate launch`, every process fits its own seeds and returns those of all.
    """
    settings = settings or HeadGatingSettings()
    journal = journal or Journal()
    responses = as_responses(task)
    check_responses(model, responses)
    warn_if_unknown(model, responses, settings.memory_gb)
    bfloat16 = use_bfloat16(model.device, settings.autocast)
    processes = Processes(model.device)
    mine = processes.share(settings.seeds)
    start = torch.stack([uniform_logits(model, settings.seed + row) for row in range(settings.seeds)])[mine]

    def batch(number: int) -> ResponseBatch:
        return draw_batch(responses, settings.batch, number, settings.seed)

    def loss(number: int, gates: Tensor) -> Tensor:
        return mean_nll(model, batch(number), gates, bfloat16)

    def at_once(number: int) -> int:
        return rows_at_once(model, batch(number), grad=True, memory_gb=settings.memory_gb)

    def schedule(rate: tuple[float, float]) -> Schedule:
        return Schedule(settings.updates, rate, settings.accumulate, settings.clamp)

    def names(fit: str) -> list[str]:
        return [f"{fit}-{row}" for row in mine]

    # 1. G, with no penalty.
    plain, losses = fit_gates(
        start,
        loss,
        at_once,
        schedule(settings.first_rate),
        start.new_zeros(len(mine)),
        journal,
        "G",
        names("gates"),
        processes.name,
    )
    # 2. G+ and G-, both from G; as rows they share every batch.
    penalties = settings.penalty * torch.tensor([1.0] * len(mine) + [-1.0] * len(mine))
    both, more = fit_gates(
        torch.cat([plain, plain]),
        loss,
        at_once,
        schedule(settings.second_rate),
        penalties,
        journal,
        "G+ and G-",
        names("plus") + names("minus"),
        processes.name,
    )
    plus, minus = both.tensor_split(2)
    history = torch.stack([losses, *more.tensor_split(2, 1)])  # (fit, update, seed)
    gates = processes.gather(torch.stack([plain, plus, minus], 1).sigmoid(), settings.seeds)
    history = processes.gather(history.permute(2, 0, 1), settings.seeds).permute(1, 2, 0)
    return HeadRoles(gates[:, 0], gates[:, 1], gates[:, 2], history)
