"""Which sequences each step reads: a function of the seed and the step, so that a resumed run restores nothing."""

from __future__ import annotations

from functools import lru_cache

import torch
from jaxtyping import Int
from torch import Tensor


class TrainingSequences:
    """An endless, numbered list of sequences, mixed from text and from sequences that the model wrote itself.

    Each kind is read in a random order, which changes whenever all its sequences have been read. Of any n consecutive
    sequences, `own_share` times n (rounded) are the model's own.
    """

    def __init__(
        self, text: Int[Tensor, "sequence token"], own: Int[Tensor, "own_sequence token"], own_share: float, seed: int
    ) -> None:
        self.text, self.own, self.seed = text, own, seed
        self.own_share = own_share if len(own) else 0.0

    def __getitem__(self, number: int) -> Int[Tensor, " token"]:
        """The sequence with this number."""
        own_before = int(number * self.own_share)
        if int((number + 1) * self.own_share) > own_before:
            return self.own[self._index(own_before, len(self.own), 1)]
        return self.text[self._index(number - own_before, len(self.text), 0)]

    def batch(self, numbers: range) -> Int[Tensor, "sequence token"]:
        """The sequences with these numbers."""
        return torch.stack([self[number] for number in numbers])

    def _index(self, number: int, size: int, kind: int) -> int:
        epoch, position = divmod(number, size)
        return int(_order(size, self.seed, kind, epoch)[position])


@lru_cache(maxsize=8)
def _order(size: int, seed: int, kind: int, epoch: int) -> Tensor:
    mixed = (seed * 1_000_003 + epoch) * 2 + kind
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
