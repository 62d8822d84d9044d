"""Which sequences each step reads: a function of the seed and the step, so that a resumed run restores nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from gatelens.sparse.mixture import TrainingText


class Batch(NamedTuple):
    """Some sequences of one length."""

    tokens: Int[Tensor, "sequence token"]
    kl: Float[Tensor, " sequence"]  # share of the KL divergence in the loss of each sequence
    text: Int[Tensor, " sequence"]  # number of the text that each sequence is from


class TrainingSequences:
    """An endless, numbered list of sequences, each from a random place in a text that is drawn by its share."""

    def __init__(self, texts: Sequence[TrainingText], seed: int) -> None:
        self.texts, self.seed = texts, seed
        shares = np.array([text.share for text in texts])
        self._up_to = np.cumsum(shares / shares.sum())

    def batch(self, numbers: Sequence[Sequence[int]], length: int) -> Batch:
        """The sequences with these numbers. A number is any tuple of integers of 0 or more."""
        drawn = [self._draw(number, length) for number in numbers]
        text = torch.tensor([index for index, _ in drawn])
        kl = torch.tensor([self.texts[index].kl for index, _ in drawn])
        return Batch(torch.stack([tokens for _, tokens in drawn]), kl, text)

    def _draw(self, number: Sequence[int], length: int) -> tuple[int, Int[Tensor, " token"]]:
        random = np.random.default_rng([self.seed, *number])
        index = min(int(np.searchsorted(self._up_to, random.random(), side="right")), len(self.texts) - 1)
        return index, self.texts[index].sequence(random, length)


def length_at(step: int, lengths: Sequence[int], seed: int) -> int:
    """The length of all sequences of a step. Within len(lengths) steps each length has its turn, in a random order."""
    turn, position = divmod(step, len(lengths))
    return lengths[int(np.random.default_rng([seed, turn]).permutation(len(lengths))[position])]
