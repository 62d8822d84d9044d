"""Learn the gates of a circuit: Adam minimises the KL divergence of the gated run from the clean run, plus a penalty.

Gates are drawn at random in every update, so that they end up open or closed and seldom between the two. A method says
how they are drawn and what the penalty is (`GateRule`). All levels whose runs pass gradients to their gates are fitted
by this code. If all prompts share their gates, an update uses one batch of prompts, in a random order; otherwise the
gates of each batch are fitted alone. A killed fit resumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from pydantic import Field
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.attribution import Attribution
from gatelens.gates.level import Level, PatchedGates, S
from gatelens.gates.passes import attribute_batches, embedding_path
from gatelens.model import Model
from gatelens.runtime.context import UNLIMITED, Context
from gatelens.runtime.interrupts import finishing_steps
from gatelens.runtime.journal import StateSaver
from gatelens.runtime.precision import widen
from gatelens.runtime.settings import Settings
from gatelens.tasks.base import Bucket, CircuitTask

_SMALLEST = 1e-6  # uniform numbers are at least this, and at most 1 minus this


class LearningSettings(Settings):
    """The settings that all methods that learn the gates of a circuit share."""

    updates: int = Field(default=300, ge=1, description="updates of the gates")
    batch: int = Field(default=8, ge=1, description="prompts in each update")
    draws: int = Field(default=1, ge=1, description="draws of the gates in each update")
    share: float = Field(default=0.05, gt=0, lt=1, description="share of the gates that the circuit should have")
    warm_start: int = Field(
        default=5, ge=0, description="points of EAP-IG, whose best gates start open (0: all gates start open)"
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="decides the draws and the order of the batches")


@dataclass(frozen=True)
class GateRule:
    """How gates are drawn from their parameters, and what is added to the loss.

    Arguments:
        draw: called as draw(parameters, uniform) with uniform numbers in (0, 1) of the same shape; returns gates in
            0..1, with gradients. A larger parameter opens the gate.
        penalty: called as penalty(parameters, multipliers, progress) with the parameters of all gates that exist, and
            with the share of the updates that are done; returns a number.
        rate: the learning rate of the parameters.
        n_multipliers: how many Lagrange multipliers the penalty has. They start at 0 and maximise it.
        multiplier_rate: the learning rate of the multipliers.
        betas: of Adam.
        open_start: the parameter of all gates if there is no warm start.
        warm_start: with one, the parameter of the best gates, and minus the parameter of all others.
        clip: the largest norm of the gradient of the parameters.
    """

    draw: Callable[[Tensor, Tensor], Tensor]
    penalty: Callable[[Tensor, Tensor, float], Tensor]
    rate: float
    n_multipliers: int = 0
    multiplier_rate: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    open_start: float = 2.0
    warm_start: float = 2.0
    clip: float = float("inf")


def learn_gates(
    level: Level[S],
    model: Model,
    task: CircuitTask,
    rule: GateRule,
    settings: LearningSettings,
    method: str,
    context: Context | None = None,
) -> S:
    """The scores of gates that are learned: the softplus of each gate's parameter.

    The score is near 0 for a gate that was learned to be closed. For one that was learned to be open it is about its
    log-odds of being open, and not in units of the metric.

    Returns:
        Scores of the level. Cost of an update: ``draws`` gated runs of ``batch`` prompts, with gradients.
    """
    context = context or Context()
    best = _best_gates(level, model, task, settings, context) if settings.warm_start else None
    batches = [part for bucket in task.buckets for part in bucket.parts(_even(len(bucket), settings.batch))]
    groups = [batches] if level.shared else [[batch] for batch in batches]
    context.begin(f"learn {level.noun}", len(groups) * settings.updates)
    learned: list[Tensor] = []
    exists: list[Tensor] = []
    for number, group in enumerate(groups):
        prompts = _Prompts(level, model, group, context)
        start = torch.full(prompts.exists.shape, rule.open_start, dtype=model.wide_dtype)
        if best is not None:
            start.fill_(-rule.warm_start)
            for parameters, positions in zip(start.flatten(1), best[len(learned) :], strict=False):
                parameters[positions] = rule.warm_start
        fit = _Fit(prompts, rule, settings, context)
        learned += fit.run(start, f"learned-{number}", number * settings.updates).flatten(1)
        exists += prompts.exists.flatten(1)
    scores = [
        torch.nn.functional.softplus(parameters) * there for parameters, there in zip(learned, exists, strict=True)
    ]
    return level.patched(model, task, PatchedGates(scores, scores, exists, method, is_sample=False))


def _even(n: int, most: int) -> int:
    """The size of parts of nearly equal size, at most ``most``, so that no prompt has much more weight than another."""
    n_parts = -(-n // most)
    return -(-n // n_parts)


def _best_gates(
    level: Level[Any], model: Model, task: CircuitTask, settings: LearningSettings, context: Context
) -> list[Int[Tensor, " _gate"]]:
    """The positions of the best gates of each gate set by EAP-IG: as many as the circuit should have."""
    points = [(step + 0.5) / settings.warm_start for step in range(settings.warm_start)]

    def scores(attribution: Attribution) -> Tensor:
        return attribution.mean_products(embedding_path(model, attribution.batch, points))

    orders = attribute_batches(level, model, task, scores, "eap-ig", context.part("first-ranking")).orders()
    return [order[: max(1, round(settings.share * len(order)))] for order in orders]


class _Prompts:
    """The batches of one fit, and the gates that exist in them.

    Arguments:
        batches: the prompts of each update. If prompts have their own gates, there is one batch.
    """

    def __init__(self, level: Level[Any], model: Model, batches: Sequence[Bucket], context: Context) -> None:
        self.level, self.model = level, model

        def numbers(length: int) -> int:
            return level.learned_numbers(model, length) + level.closed_numbers(model, length)

        # A batch runs in parts that fit into memory. What closed gates read is cached for as many parts as fit, too.
        self.parts = [batch.parts(min(len(batch), context.fits(numbers(batch.clean.shape[1])))) for batch in batches]
        largest = max(len(part) * level.closed_numbers(model, part.clean.shape[1]) for [part, *_] in self.parts)
        self.runs: Callable[[int, int], tuple[Any, Tensor]] = lru_cache(maxsize=context.fits(2 * largest))(self._runs)
        self.exists = self._exists(batches)

    def _exists(self, batches: Sequence[Bucket]) -> Bool[Tensor, "_set ..."]:
        """Where a gate exists, for each gate set: one set if prompts share their gates, else one for each prompt."""
        first, level = batches[0], self.level
        shape = level.shape(self.model, first.clean.shape[1])
        runs = () if level.shared else [level.capture(self.model, tokens) for tokens in (first.clean, first.corrupt)]
        positions = level.positions(self.model, *runs)
        exists = torch.zeros(len(positions), torch.Size(shape).numel(), dtype=torch.bool)
        for there, places in zip(exists, positions, strict=True):
            there[places] = True
        return exists.unflatten(1, shape)

    @torch.no_grad()
    def _runs(self, batch: int, part: int) -> tuple[Any, Float[Tensor, "prompt vocab"]]:
        """What closed gates read, and the log-probabilities of the clean run."""
        prompts = self.parts[batch][part]
        logits = self.level.capture(self.model, prompts.clean).logits
        closed = self.level.reads(self.level.capture(self.model, prompts.corrupt))
        return closed, widen(logits).log_softmax(-1)

    def loss(self, batch: int, part: int, gates: Shaped[Tensor, "_set ..."]) -> Tensor:
        """The KL divergence of the gated run from the clean run, summed over the prompts of a part.

        Arguments:
            gates: one draw of the gates of all sets.
        """
        closed, target = self.runs(batch, part)
        tokens = self.parts[batch][part].clean
        first = sum(map(len, self.parts[batch][:part]))
        row = gates[0] if self.level.shared else gates[first : first + len(tokens)]
        logits = self.level.run(self.model, tokens, row[None], closed, context=UNLIMITED)[0]
        return torch.nn.functional.kl_div(widen(logits).log_softmax(-1), target, reduction="sum", log_target=True)


class _Fit:
    """The fit of some gates by Adam."""

    def __init__(self, prompts: _Prompts, rule: GateRule, settings: LearningSettings, context: Context) -> None:
        self.prompts, self.rule, self.settings, self.journal = prompts, rule, settings, context.journal

    def run(self, start: Tensor, name: str, reached: int) -> Tensor:
        """The parameters after all updates.

        Arguments:
            start: (set, ...), the parameters to start from.
            name: the name under which the state is saved.
            reached: how many updates earlier fits have made, for the progress.
        """
        state = _State.of(start, self.rule.n_multipliers)
        for saved in self.journal.kept(f"{name}."):
            state.resume(saved, self.settings.updates)
        parameters, multipliers = (tensor.requires_grad_() for tensor in (state.parameters, state.multipliers))
        optimizers = [
            torch.optim.Adam([parameters], lr=self.rule.rate, betas=self.rule.betas),
            torch.optim.Adam([multipliers], lr=self.rule.multiplier_rate, betas=self.rule.betas, maximize=True),
        ]
        state.give_to(optimizers)
        saver = StateSaver(self.journal, f"{name}.state", state.done)
        self.journal.reach(reached + state.done)
        with finishing_steps() as stop:
            while state.done < self.settings.updates:
                self._update(parameters, multipliers, state.done)
                for optimizer in optimizers:
                    optimizer.step()
                state.done += 1
                is_last = state.done == self.settings.updates
                saver.step(state.done, state.tensors, at_once=stop.received or is_last)
                self.journal.reach(reached + state.done)
                if stop.received:
                    raise KeyboardInterrupt
        return parameters.detach()

    def _update(self, parameters: Tensor, multipliers: Tensor, update: int) -> None:
        """Set the gradients of one update."""
        settings, exists = self.settings, self.prompts.exists
        batch = self._batch(update)
        n_prompts = sum(map(len, self.prompts.parts[batch]))
        gradient = torch.zeros_like(parameters)
        for draw in range(settings.draws):
            uniform = _uniform(parameters, (settings.seed, 1, update, draw))
            for part in range(len(self.prompts.parts[batch])):
                gates = self.rule.draw(parameters, uniform).where(exists, 1)
                loss = self.prompts.loss(batch, part, gates.to(self.prompts.model.device))
                if not loss.isfinite():
                    raise GatelensError(
                        f"the loss of update {update} is not a finite number: load the model in a wider dtype, or "
                        "check that its weights are complete."
                    )
                gradient += torch.autograd.grad(loss / (n_prompts * settings.draws), parameters)[0]
        penalty = self.rule.penalty(parameters[exists], multipliers, update / settings.updates)
        of_penalty, multipliers.grad = torch.autograd.grad(
            penalty, (parameters, multipliers), allow_unused=True, materialize_grads=True
        )
        parameters.grad = gradient + of_penalty
        torch.nn.utils.clip_grad_norm_([parameters], self.rule.clip)

    def _batch(self, update: int) -> int:
        """The number of the batch of an update. All batches have their turn before the next random order begins."""
        epoch, turn = divmod(update, len(self.prompts.parts))
        order = torch.randperm(len(self.prompts.parts), generator=_generator((self.settings.seed, 0, epoch)))
        return int(order[turn])


@dataclass
class _State:
    """The state of a fit, which is saved."""

    parameters: Tensor
    multipliers: Tensor
    moments: list[Tensor]  # Adam's two moments of the parameters, then those of the multipliers
    done: int = 0  # updates so far

    @classmethod
    def of(cls, start: Tensor, n_multipliers: int) -> _State:
        multipliers = torch.zeros(n_multipliers, dtype=start.dtype)
        return cls(start.clone(), multipliers, [torch.zeros_like(x) for x in (start, start, multipliers, multipliers)])

    def resume(self, saved: dict[str, Tensor], updates: int) -> None:
        """Continue from saved tensors if they fit and are ahead."""
        names = ("parameters", "multipliers", "moment-0", "moment-1", "moment-2", "moment-3")
        own = (self.parameters, self.multipliers, *self.moments)
        fits = all(name in saved and saved[name].shape == mine.shape for name, mine in zip(names, own, strict=True))
        done = int(saved.get("done", torch.zeros(())))
        if fits and self.done < done <= updates:
            for name, mine in zip(names, own, strict=True):
                mine.copy_(saved[name])
            self.done = done

    def give_to(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let the optimizers continue from this state."""
        for optimizer, tensor, (first, second) in zip(
            optimizers, (self.parameters, self.multipliers), (self.moments[:2], self.moments[2:]), strict=True
        ):
            step = torch.tensor(float(self.done))
            optimizer.state[tensor] = {"step": step, "exp_avg": first, "exp_avg_sq": second}

    def tensors(self) -> dict[str, Tensor]:
        """The state as tensors to save. The optimizers change them in place."""
        moments = {f"moment-{i}": moment for i, moment in enumerate(self.moments)}
        own = {"parameters": self.parameters.detach(), "multipliers": self.multipliers.detach()}
        return {**own, **moments, "done": torch.tensor(self.done)}


def _uniform(like: Tensor, seeds: Sequence[int]) -> Tensor:
    """Uniform numbers in (0, 1) that depend only on the seeds and the shape."""
    numbers = torch.rand(like.shape, generator=_generator(seeds), dtype=like.dtype)
    return numbers.clamp(_SMALLEST, 1 - _SMALLEST)


def _generator(seeds: Sequence[int]) -> torch.Generator:
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed) % 2**63
    return torch.Generator().manual_seed(mixed)
