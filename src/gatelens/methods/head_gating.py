"""Causal Head Gating: does a head help, hinder, or not matter?

Gates G multiply every head's output and are learned, three times for each seed: G from a uniform start with no penalty;
then, both starting from it, G+, rewarded for open gates, and G-, rewarded for closed ones. A head that is needed stays
open in G-; one that hinders is closed even in G+; one that does not matter follows the reward.
(Nam et al., "Causal Head Gating", arXiv 2505.13737.)
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gatelens.batches import as_responses
from gatelens.errors import GatelensError, GatelensWarning
from gatelens.gates.responses import response_log_probs, rows_at_once, token_counts
from gatelens.journal import Journal
from gatelens.model import Model
from gatelens.processes import all_rows, my_rows
from gatelens.tasks.base import CircuitTask, ResponseBatch, ResponseTask

KINDS = ("facilitation", "irrelevance", "interference")


@dataclass(frozen=True)
class HeadGatingSettings:
    """How gates are fitted. The defaults are the paper's."""

    seeds: int = field(default=10, metadata={"help": "fits from different uniform starts, as rows of one batch"})
    updates: int = field(default=500, metadata={"help": "updates of each of the three fits"})
    batch: int = field(default=16, metadata={"help": "examples in a batch"})
    accumulate: int = field(default=1, metadata={"help": "batches for each update"})
    penalty: float = field(
        default=0.1, metadata={"help": "reward for open (G+) or closed (G-) gates, in nats per logit"}
    )
    clamp: float = field(default=4.0, metadata={"help": "gate logits beyond this are not rewarded further"})
    first_rate: tuple[float, float] = field(default=(0.1, 0.01), metadata={"help": "learning rate of G, start and end"})
    second_rate: tuple[float, float] = field(default=(0.5, 0.1), metadata={"help": "of G+ and G-, start and end"})
    seed: int = field(default=0, metadata={"help": "the first seed; also of the order of the data"})
    memory_gb: float = field(default=4.0, metadata={"help": "memory for runs, in GB, besides the model itself"})

    def __post_init__(self) -> None:
        for name in ("seeds", "updates", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise GatelensError(f"{name} is at least 1, not {getattr(self, name)}.")
        if self.penalty < 0 or self.clamp <= 0 or self.memory_gb <= 0:
            raise GatelensError("penalty is 0 or more, clamp and memory_gb are above 0.")


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

    def summary(self) -> dict[str, dict[str, float]]:
        """For each kind the share of heads at or above 0.5 in all seeds, and in any seed."""
        marked = {name: self.kind(name) >= 0.5 for name in KINDS}
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

    A circuit task counts as one whose response is its answer.
    """
    settings = settings or HeadGatingSettings()
    journal = journal or Journal()
    responses = as_responses(task)
    check_responses(model, responses, settings.memory_gb)
    fit = partial(_Fit, model, list(responses.batches(settings.batch)), settings, journal)
    mine = my_rows(settings.seeds)
    start = torch.stack([_uniform(model, settings.seed + row) for row in mine])
    # 1. G, with no penalty.
    plain, losses = fit("G", settings.first_rate, torch.zeros(len(mine))).run(start)
    # 2. G+ and G-, both from G; as rows they share every batch.
    signs = torch.tensor([1.0] * len(mine) + [-1.0] * len(mine))
    both, more = fit("G+ and G-", settings.second_rate, settings.penalty * signs).run(torch.cat([plain, plain]))
    plus, minus = both.split(len(mine))
    history = torch.stack([losses, *more.split(len(mine), 1)])  # (fit, update, seed)
    gates = all_rows(torch.stack([plain, plus, minus], 1).sigmoid(), settings.seeds)
    history = all_rows(history.permute(2, 0, 1), settings.seeds).permute(1, 2, 0)
    return HeadRoles(gates[:, 0], gates[:, 1], gates[:, 2], history)


class _Fit:
    """Gate logits learned by Adam on batches in an order that depends on the seed only; a row for each fit."""

    segment = 25  # updates in one piece of work

    def __init__(
        self,
        model: Model,
        batches: list[ResponseBatch],
        settings: HeadGatingSettings,
        journal: Journal,
        name: str,
        rate: tuple[float, float],
        penalties: Tensor,
    ) -> None:
        self.model, self.batches, self.settings, self.journal = model, batches, settings, journal
        self.name, self.rate, self.penalties = name, rate, penalties

    def run(self, start: Tensor) -> tuple[Tensor, Tensor]:
        """Gate logits (row, layer, head) after all updates, and losses (update, row)."""
        updates = self.settings.updates
        segments = [range(at, min(at + self.segment, updates)) for at in range(0, updates, self.segment)]
        self.journal.begin(f"fit {self.name}", len(segments))
        state = torch.stack([start, torch.zeros_like(start), torch.zeros_like(start)])  # logits, Adam's two moments
        losses: list[Tensor] = []
        for number, segment in enumerate(segments):
            key = f"{self.name.replace(' ', '-')}-{number}"
            packed = self.journal.piece(key, partial(self._run_segment, state, segment))
            state = packed[: state.numel()].view_as(state)
            losses.append(packed[state.numel() :].view(len(segment), len(start)))
        return state[0], torch.cat(losses)

    def _run_segment(self, state: Tensor, segment: range) -> Tensor:
        logits = state[0].clone().requires_grad_()
        optimizer = torch.optim.Adam([logits], lr=self.rate[0])
        if segment.start:
            moments = {"exp_avg": state[1].clone(), "exp_avg_sq": state[2].clone()}
            optimizer.state[logits] = {"step": torch.tensor(float(segment.start)), **moments}
        losses = torch.zeros(len(segment), len(logits))
        for row, update in enumerate(segment):
            for group in optimizer.param_groups:
                group["lr"] = self.rate[0] + (self.rate[1] - self.rate[0]) * update / max(1, self.settings.updates - 1)
            optimizer.zero_grad()
            losses[row] = self._backward(logits, update)
            optimizer.step()
        adam = optimizer.state[logits]
        packed = [logits.detach(), adam["exp_avg"], adam["exp_avg_sq"], losses]
        return torch.cat([part.flatten() for part in packed])

    def _backward(self, logits: Tensor, update: int) -> Tensor:
        """Add one update's gradients; return each row's mean NLL of the target tokens."""
        settings = self.settings
        losses = torch.zeros(len(logits))
        for part in range(settings.accumulate):
            batch = self._batch(update * settings.accumulate + part)
            at_once = rows_at_once(self.model, batch, grad=True, memory_gb=settings.memory_gb)
            for rows in torch.arange(len(logits)).split(at_once):
                loss = mean_nll(self.model, batch, logits[rows].sigmoid()) / settings.accumulate  # (row,)
                loss.sum().backward()
                losses[rows] += loss.detach().cpu().float()
        reward = logits.clamp(-settings.clamp, settings.clamp).mean((1, 2))
        (-self.penalties * reward).sum().backward()
        return losses

    def _batch(self, number: int) -> ResponseBatch:
        """The batch of this number: every epoch has its own order."""
        epoch, place = divmod(number, len(self.batches))
        generator = torch.Generator().manual_seed(self.settings.seed * 1_000_003 + epoch)
        return self.batches[int(torch.randperm(len(self.batches), generator=generator)[place])]


def mean_nll(model: Model, batch: ResponseBatch, gates: Tensor) -> Tensor:
    """Mean over examples of the mean NLL of their target tokens, under each row of gates: (row,)."""
    sums = response_log_probs(model, batch, gates, memory_gb=None)
    return -(sums / token_counts(batch).to(sums)).mean(1)


def check_responses(model: Model, task: ResponseTask, memory_gb: float) -> None:
    """Refuse examples that do not fit into the model; warn where the model does not know the responses at all."""
    for number, example in enumerate(task.examples):
        if len(example) > model.context:
            raise GatelensError(
                f"example {number} of {task.name} ({example.prompt[:40]!r}...) has {len(example)} tokens with its "
                f"response, and {model.name} reads {model.context}: leave it out or shorten it."
            )
    ones = torch.ones(1, model.n_layers, model.n_heads)
    worst, total = (0.0, 0), 0.0
    for batch in task.batches(16):
        with torch.no_grad():
            sums = response_log_probs(model, batch, ones, memory_gb=memory_gb)[0].cpu()
        means = sums / token_counts(batch)
        total += float(means.sum())
        worst = min(worst, *((float(mean), int(which)) for mean, which in zip(means, batch.which, strict=True)))
    # A fair guess among all tokens is the least that a model with the behaviour must beat by far.
    guess = -float(torch.log(torch.tensor(float(model.hf.config.vocab_size))))
    if total / len(task) < 0.5 * guess:
        text = task.examples[worst[1]].prompt[-60:]
        warnings.warn(
            f"{model.name} gives the responses of {task.name} a mean log-probability of {total / len(task):.1f} per "
            f"token (a blind guess: {guess:.1f}): it hardly has the behaviour, and roles of heads mean little. The worst is "
            f"example {worst[1]} (...{text!r}).",
            GatelensWarning,
            stacklevel=3,
        )


def _uniform(model: Model, seed: int) -> Tensor:
    """Gate logits of uniform gates: (layer, head)."""
    gates = torch.rand(model.n_layers, model.n_heads, generator=torch.Generator().manual_seed(seed))
    return gates.clamp(1e-6, 1 - 1e-6).logit()
