"""Optimal ablation: constants for closed gates to read, with which circuits stay closest to the whole model.

A closed gate that reads a constant carries no information about the prompt. Of all constants, the optimal ones do the
least other harm: they minimise the KL divergence of circuits from the clean run at the last position. A head has one
constant, its output z; on the component graph each source has one, which all its closed edges read. (Li and Janson,
arXiv 2409.09951, fit the constants of one ablation, or together with one circuit. Here one set of constants serves all
circuits of a curve, so it is fitted on random circuits of all sizes. That is our choice.)

The fit starts from the means. Adam moves the constants in units of the root-mean-square distance of each head's or
source's output from its mean, with a learning rate that falls linearly to 0. A killed fit resumes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.gates.component_runs import Components, capture_components
from gatelens.gates.edge_backward import learned_edge_numbers, run_learned_constants
from gatelens.gates.head_runs import run_heads
from gatelens.gates.runs import Run, capture, gradient_numbers
from gatelens.model import Model
from gatelens.model.graph import Graph
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
    model: Model, batches: Sequence[Bucket], start: Float[Tensor, "layer head dim"], context: Context
) -> Float[Tensor, "layer head dim"]:
    """The constants that closed heads write.

    Arguments:
        batches: the prompts. Circuits run on the clean ones.
        start: the constants to start from: the means.

    Returns:
        The constants. Cost: `UPDATES` forward-backward passes of at most `PROMPTS` prompts, and 2 forwards.
    """
    return _HeadFit(model, batches, start, context).constants()


def fit_edge_constants(
    model: Model, batches: Sequence[Bucket], start: Float[Tensor, "source width"], context: Context
) -> Float[Tensor, "source width"]:
    """The constants that closed edges read, one for each source of the component graph.

    Arguments:
        batches, start: as for `fit_head_constants`.

    Returns:
        The constants. Cost: `UPDATES` runs of edges with gradients (about 5 forwards) of at most `PROMPTS` prompts, and
        2 forwards; one more forward for each update if the clean runs of all prompts do not fit into memory.
    """
    return _EdgeFit(model, batches, start, context).constants()


class _Fit(ABC):
    """One fit. The last axis of constants holds the numbers of one constant, the others say whose it is."""

    def __init__(self, model: Model, batches: Sequence[Bucket], start: Tensor, context: Context) -> None:
        self.model, self.context, self.start = model, context, widen(start).cpu()
        half = context.with_memory(context.memory_gb / 2)  # one half for a run with gradients, one for clean runs
        self.parts = [
            part
            for batch in batches
            for part in batch.parts(min(len(batch), PROMPTS, half.fits(self.numbers(batch.clean.shape[1]))))
        ]
        longest = max(part.clean.numel() for part in self.parts)
        self.clean = lru_cache(maxsize=half.fits(self.kept_numbers(longest)))(self.capture)
        self.scale = self._deviations()

    # What a level knows

    @abstractmethod
    def numbers(self, length: int) -> int:
        """How many numbers a run with gradients holds for one prompt."""

    @abstractmethod
    def kept_numbers(self, n_tokens: int) -> int:
        """How many numbers of a captured run are kept."""

    @abstractmethod
    def capture(self, number: int) -> Any:
        """The clean run of one part."""

    @abstractmethod
    def squares(self, number: int) -> Tensor:
        """The squared distance of each output from its start, mean over its numbers and summed over the tokens."""

    @abstractmethod
    def run(self, number: int, constants: Tensor, seed: int) -> Float[Tensor, "prompt vocab"]:
        """The logits of a random circuit on one part. Gradients reach the constants."""

    # The fit

    def constants(self) -> Tensor:
        """The fitted constants, in the shape of the start."""
        state = torch.zeros(3, *self.start.shape, dtype=self.start.dtype)  # shifts from the start, Adam's two moments
        firsts = range(0, UPDATES, _PIECE)
        self.context.begin("fit constants", len(firsts))
        for first in firsts:
            state = self.context.piece(f"optimal-{first}", partial(self._updates, state, first))
        return self._shifted(state[0])

    def _updates(self, state: Tensor, first: int) -> Tensor:
        """The state after one piece of updates."""
        shifts, *moments = (tensor.clone() for tensor in state)
        shifts.requires_grad_()
        optimizer = torch.optim.Adam([shifts])
        step = torch.tensor(float(first))
        optimizer.state[shifts] = {"step": step, "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        for update in range(first, min(first + _PIECE, UPDATES)):
            optimizer.param_groups[0]["lr"] = _RATE * (1 - update / UPDATES)
            loss = self._loss(update % len(self.parts), shifts, update)
            if not loss.isfinite():
                raise GatelensError(
                    f"the loss of update {update} is not a finite number: load the model in a wider dtype, or use "
                    "another source than 'optimal'."
                )
            [shifts.grad] = torch.autograd.grad(loss, shifts)
            optimizer.step()
        return torch.stack([shifts.detach(), *moments])

    def _loss(self, number: int, shifts: Tensor, seed: int) -> Tensor:
        """The KL divergence of one random circuit from the clean run, mean over the prompts of a part."""
        logits = self.run(number, self._shifted(shifts).to(self.model.device), seed)
        log_probabilities, target = (widen(own).log_softmax(-1) for own in (logits, self.clean(number).logits))
        return torch.nn.functional.kl_div(log_probabilities, target, reduction="batchmean", log_target=True)

    def _shifted(self, shifts: Tensor) -> Tensor:
        return self.start + self.scale[..., None] * shifts

    def _deviations(self) -> Tensor:
        """The root-mean-square distance of each output from its start, over clean prompts, positions and numbers."""
        total = sum(widen(self.squares(number)).cpu() for number in range(len(self.parts)))
        return (torch.as_tensor(total) / sum(part.clean.numel() for part in self.parts)).sqrt()


class _HeadFit(_Fit):
    """Constants (layer, head, dim) of heads."""

    def numbers(self, length: int) -> int:
        return gradient_numbers(self.model, length)

    def kept_numbers(self, n_tokens: int) -> int:
        return n_tokens * self.start.numel() + PROMPTS * int(self.model.hf.config.vocab_size)

    def capture(self, number: int) -> Run:
        return capture(self.model, self.parts[number].clean, streams=False)

    def squares(self, number: int) -> Float[Tensor, "layer head"]:
        by_layer = zip(self.clean(number).heads, self.start, strict=True)
        return torch.stack([(widen(z).cpu() - start).square().mean(-1).sum((0, 1)) for z, start in by_layer])

    def run(self, number: int, constants: Tensor, seed: int) -> Float[Tensor, "prompt vocab"]:
        gates = random_circuit(self.start.shape[:2], seed)[None].to(constants.dtype)
        return run_heads(self.model, self.parts[number].clean, gates, constants.unbind(0), context=UNLIMITED)[0]


class _EdgeFit(_Fit):
    """Constants (source, width) of the sources of the component graph."""

    def numbers(self, length: int) -> int:
        return learned_edge_numbers(self.model, length) + self.kept_numbers(length)

    def kept_numbers(self, n_tokens: int) -> int:
        graph = Graph.of(self.model.anatomy)
        return n_tokens * self.model.anatomy.width * (graph.n_sources + 2 * graph.n_layers + 1)

    def capture(self, number: int) -> Components:
        return capture_components(self.model, self.parts[number].clean)

    def squares(self, number: int) -> Float[Tensor, " source"]:
        outputs = self.clean(number).sources
        return torch.stack(
            [(own - start.to(own)).square().mean(-1).sum() for own, start in zip(outputs, self.start, strict=True)]
        )

    def run(self, number: int, constants: Tensor, seed: int) -> Float[Tensor, "prompt vocab"]:
        edges = Graph.of(self.model.anatomy).edges
        gates = torch.zeros(edges.shape)
        gates[edges] = random_circuit([int(edges.sum())], seed)
        tokens = self.parts[number].clean
        return run_learned_constants(self.model, tokens, gates[None], constants, self.clean(number))[0]


def random_circuit(shape: Sequence[int], seed: int) -> Float[Tensor, "*shape"]:
    """Gates of a circuit whose share of open gates is uniform in 0..1. At least one gate is closed."""
    generator = torch.Generator().manual_seed(seed)
    share, drawn = torch.rand((), generator=generator), torch.rand(*shape, generator=generator)
    gates = (drawn < share).float()
    gates.view(-1)[drawn.argmax()] = 0
    return gates
