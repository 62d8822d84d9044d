"""Which sequences each step reads: a function of the seed and the step, so that a resumed run restores nothing."""

from __future__ import annotations

from collections.abc import Sequence
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


def length_at(step: int, lengths: Sequence[int], seed: int) -> int:
    """The length of all sequences of a step. Within len(lengths) steps each length has its turn, in a random order."""
    turn, position = divmod(step, len(lengths))
    return lengths[int(_order(len(lengths), seed, 0, turn)[position])]


def cut(tokens: Int[Tensor, "sequence token"], length: int) -> Int[Tensor, "piece length"]:
    """Cut each sequence into pieces of this length, in order. Tokens that are left over at its end are dropped."""
    return tokens.unfold(1, length, length).flatten(0, 1)


@lru_cache(maxsize=8)
def _order(size: int, seed: int, kind: int, epoch: int) -> Tensor:
    mixed = (seed * 1_000_003 + epoch) * 2 + kind
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
