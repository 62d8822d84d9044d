"""Which sequences each step reads: a function of the seed and the step alone, so that there is nothing to restore."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


class Rows:
    """An endless, numbered row of sequences, mixed from text and from what the model wrote itself.

    Each kind is read in a random order, and in another one when it has been read to its end. Of any n rows in a row,
    `share` times n, rounded, are the model's own.
    """

    def __init__(self, text: Tensor, own: Tensor, share: float, seed: int) -> None:
        self.text, self.own, self.seed = text, own, seed
        self.share = share if len(own) else 0.0

    def __getitem__(self, number: int) -> Tensor:
        """The sequence of this number: (token,)."""
        of_own = int(number * self.share)
        if int((number + 1) * self.share) > of_own:
            return self.own[self._place(of_own, len(self.own), 1)]
        return self.text[self._place(number - of_own, len(self.text), 0)]

    def batch(self, numbers: range) -> Tensor:
        """(row, token)"""
        return torch.stack([self[number] for number in numbers])

    def _place(self, number: int, size: int, kind: int) -> int:
        round_, place = divmod(number, size)
        return int(_order(size, self.seed, kind, round_)[place])


@lru_cache(maxsize=8)
def _order(size: int, seed: int, kind: int, round_: int) -> Tensor:
    mixed = (seed * 1_000_003 + round_) * 2 + kind
    return torch.randperm(size, generator=torch.Generator().manual_seed(mixed))
