"""Optimal ablation: one constant for each head, with which circuits stay closest to the whole model.

A closed head that writes a constant carries no information about the prompt. Of all constants, the optimal ones do the
least other harm: they minimise the KL divergence of circuits from the clean run at the last position. (Li and Janson,
arXiv 2409.09951, fit the constants of one ablation, or together with one circuit. Here one set of constants serves all
circuits of a curve, so it is fitted on random circuits of all sizes. That is our choice.)

The fit starts from the mean outputs of the heads. Adam moves them in units of the standard deviation of each head's
output, with a learning rate that falls linearly to 0. A killed fit resumes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import capture, gradient_numbers
from gatelens.model import Model
from gatelens.runtime.context import UNLIMITED, Context
from gatelens.runtime.precision import widen
from gatelens.tasks.base import Bucket

UPDATES = 200
"""Updates of the fit."""
PROMPTS = 8
"""Prompts in each update, at most."""
_PIECE = 25  # updates in one piece of work
_RATE = 0.05


def fit_head_constants(
    model: Model, batches: Sequence[Bucket], start: Sequence[Float[Tensor, "head dim"]], context: Context
) -> list[Float[Tensor, "head dim"]]:
    """The constants that closed heads write, for each layer.

    Arguments:
        batches: the prompts. Circuits run on the clean ones.
        start: the constants to start from: the means.

    Returns:
        The constants. Cost: `UPDATES` forward-backward passes of at most `PROMPTS` prompts, and 2 forwards.
    """
    return list(_Fit(model, batches, start, context).run().unbind(0))


class _Fit:
    """One fit. Constants are (layer, head, dim)."""

    def __init__(self, model: Model, batches: Sequence[Bucket], start: Sequence[Tensor], context: Context) -> None:
        self.model, self.context = model, context
        self.parts = [
            part
            for batch in batches
            for part in batch.parts(
                min(len(batch), PROMPTS, context.fits(gradient_numbers(model, batch.clean.shape[1])))
            )
        ]
        self.start = torch.stack([widen(mean).cpu() for mean in start])
        self.scale = self._deviations()
        numbers = PROMPTS * int(model.hf.config.vocab_size)
        self.target = lru_cache(maxsize=context.fits(numbers))(self._target)

    def run(self) -> Float[Tensor, "layer head dim"]:
        state = torch.zeros(3, *self.start.shape, dtype=self.start.dtype)  # shifts from the start, Adam's two moments
        firsts = range(0, UPDATES, _PIECE)
        self.context.begin("fit constants", len(firsts))
        for first in firsts:
            state = self.context.piece(f"optimal-{first}", partial(self._updates, state, first))
        return self._constants(state[0])

    def _updates(self, state: Tensor, first: int) -> Tensor:
        """The state after one piece of updates."""
        shifts, *moments = (tensor.clone() for tensor in state)
        shifts.requires_grad_()
        optimizer = torch.optim.Adam([shifts])
        step = torch.tensor(float(first))
        optimizer.state[shifts] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        for update in range(first, min(first + _PIECE, UPDATES)):
            optimizer.param_groups[0]["lr"] = _RATE * (1 - update / UPDATES)
            loss = self._loss(update % len(self.parts), shifts, random_circuit(self.start.shape[:2], update))
            if not loss.isfinite():
                raise GatelensError(
                    f"the loss of update {update} is not a finite number: load the model in a wider dtype, or use "
                    "another source than 'optimal'."
                )
            [shifts.grad] = torch.autograd.grad(loss, shifts)
            optimizer.step()
        return torch.stack([shifts.detach(), *moments])

    def _loss(self, number: int, shifts: Tensor, gates: Tensor) -> Tensor:
        """The KL divergence of one circuit from the clean run, mean over the prompts of a part."""
        tokens = self.parts[number].clean
        constants = self._constants(shifts).to(self.model.device).unbind(0)
        logits = run_heads(self.model, tokens, gates[None].to(shifts.dtype), constants, context=UNLIMITED)[0]
        target = self.target(number)
        log_probabilities = widen(logits).log_softmax(-1)
        return torch.nn.functional.kl_div(log_probabilities, target, reduction="batchmean", log_target=True)

    def _constants(self, shifts: Tensor) -> Tensor:
        return self.start + self.scale[..., None] * shifts

    def _target(self, number: int) -> Float[Tensor, "prompt vocab"]:
        """The log-probabilities of the clean run."""
        return widen(capture(self.model, self.parts[number].clean, streams=False).logits).log_softmax(-1)

    def _deviations(self) -> Float[Tensor, "layer head"]:
        """The standard deviation of each head's output, over clean prompts, positions and numbers."""
        total, n_tokens = torch.zeros(self.start.shape[:2], dtype=self.start.dtype), 0
        for part in self.parts:
            heads = capture(self.model, part.clean, streams=False).heads
            for layer, z in enumerate(heads):
                total[layer] += (widen(z).cpu() - self.start[layer]).square().mean(-1).sum((0, 1))
            n_tokens += part.clean.numel()
        return (total / n_tokens).sqrt()


def random_circuit(shape: Sequence[int], seed: int) -> Float[Tensor, "layer head"]:
    """Gates of a circuit whose share of open heads is uniform in 0..1. At least one head is closed."""
    generator = torch.Generator().manual_seed(seed)
    share, drawn = torch.rand((), generator=generator), torch.rand(*shape, generator=generator)
    gates = (drawn < share).float()
    gates.view(-1)[drawn.argmax()] = 0
    return gates
