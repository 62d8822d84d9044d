"""Attribution at any level: products of (clean - corrupt contribution) of every gate with gradients of the metric.

A level says what its contributions are and where their gradients are taken (`Level.attribution`). A method says in
which forward-backward passes gradients are taken (`Pass`), and what is done with the products of each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from gatelens.gates.gradients import Metric, Pass, SourceGroup
from gatelens.model import Model
from gatelens.tasks.base import Bucket


class SoftmaxProducts(NamedTuple):
    """Products with the exact change of attention weights (`Attribution.softmax_products`)."""

    gates: tuple[slice, ...]  # which gates: an index of (prompt, ...)
    products: Shaped[Tensor, "_pass prompt ..."]  # of these gates, for each pass


class Attribution(ABC):
    """The products of one batch at one level.

    Arguments:
        metric: maps logits (prompt, vocab) of the batch to one number for each prompt.
    """

    def __init__(self, model: Model, batch: Bucket, metric: Metric) -> None:
        self.model, self.batch, self.metric = model, batch, metric

    @abstractmethod
    def products(self, step: Pass) -> Shaped[Tensor, "prompt ..."]:
        """Compute ``(clean - corrupt contribution) . d metric / d input`` of every gate of every prompt in one pass.

        If the pass belongs to some sources only (`Pass.only`), the products of all other sources are 0.
        """

    @abstractmethod
    def groups(self) -> list[SourceGroup]:
        """The sources that have gates at this level, as groups that a path of activations moves together."""

    def softmax_products(
        self, z_gradients: Sequence[Mapping[int, Float[Tensor, "prompt position _"]]]
    ) -> Iterator[SoftmaxProducts]:
        """The products of gates that change queries or keys, with the exact change of the attention weights.

        A gradient underestimates what such a gate does where the softmax is saturated. Here attention weights are
        computed again without the gate, and only what they do to the metric is linear.

        Arguments:
            z_gradients: the gradient at the outputs z of the heads by layer, for each of several passes.

        Returns:
            One entry for some of the gates at a time. By default none: gates of most levels change no query or key.
        """
        return iter(())

    def mean_products(self, steps: Sequence[Pass]) -> Shaped[Tensor, "prompt ..."]:
        """The mean of the products over passes."""
        total = self.products(steps[0])
        for step in steps[1:]:
            total += self.products(step)
        return total.div_(len(steps))

    def piece(self, scores: Shaped[Tensor, "prompt ..."]) -> Shaped[Tensor, ...]:
        """What is saved of the batch's scores, and given to `Level.attributed`.

        By default these are sums over prompts (`prompt_sums`).
        """
        return prompt_sums(scores)


def prompt_sums(scores: Shaped[Tensor, "prompt ..."]) -> Shaped[Tensor, "3 ..."]:
    """Three sums over the prompts of a batch: of the scores, of their absolute values, and of their squares.

    No more is kept of single prompts. The squares give the standard errors of the scores.
    """
    return torch.stack([scores.sum(0), scores.abs().sum(0), scores.square().sum(0)])


def standard_errors(
    means: Shaped[Tensor, ...], squares: Shaped[Tensor, ...], n_prompts: int
) -> Shaped[Tensor, ...] | None:
    """The standard error of each score: the standard deviation of its mean over resampled prompts (bootstrap).

    Arguments:
        means, squares: of the scores and of their squares, mean over prompts.

    Returns:
        None for one prompt, which cannot be resampled.
    """
    return ((squares - means.square()).clamp(min=0) / n_prompts).sqrt() if n_prompts > 1 else None
