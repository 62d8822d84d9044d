"""Which keys a query sees: causal order, sliding window, padding and an arbitrary mask."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """The visible pairs of all queries and keys, of which only a part is ever built at a time.

    Arguments:
        causal: the queries are the last tokens of the keys, and no query sees a later key.
        window: a query sees this many keys at most, counted back from itself.
        padding: True for a real token.
        mask: True for a visible pair. The axes batch, kv_head and group may have size 1.
    """

    queries: int
    keys: int
    causal: bool
    window: int | None
    padding: Bool[Tensor, "batch key"] | None
    mask: Bool[Tensor, "#batch #kv_head #group query key"] | None

    @property
    def first_position(self) -> int:
        """The position of the first query among the keys."""
        return self.keys - self.queries if self.causal else 0

    def key_range(self, start: int, stop: int) -> tuple[int, int, int]:
        """Where the keys are that the queries from `start` to `stop` see.

        Returns:
            low, full, high: no query sees a key outside low..high, and every query sees all keys from low to full.
        """
        low, high = 0, self.keys
        if self.causal:
            high = self.first_position + stop
        if self.window is not None:
            low = max(0, self.first_position + start - self.window + 1)
        if self.mask is not None:
            seen = self.mask[..., start:stop, :].flatten(0, -2).any(0).nonzero()
            low, high = (max(low, int(seen[0])), min(high, int(seen[-1]) + 1)) if len(seen) else (0, 0)
        if self.window is not None or self.padding is not None or self.mask is not None:
            full = low
        else:
            full = self.first_position + start + 1 if self.causal else high
        return low, full, max(low, high)

    def hidden(
        self, start: int, stop: int, low: int, high: int, device: torch.device
    ) -> Bool[Tensor, "#batch #kv_head #group some_queries some_keys"]:
        """True where a query from `start` to `stop` does not see a key from `low` to `high`."""
        query = torch.arange(self.first_position + start, self.first_position + stop, device=device)[:, None]
        key = torch.arange(low, high, device=device)
        hidden = torch.zeros(1, 1, 1, stop - start, high - low, dtype=torch.bool, device=device)
        if self.causal:
            hidden = hidden | (key > query)
        if self.window is not None:
            hidden = hidden | (key <= query - self.window)
        if self.padding is not None:
            hidden = hidden | ~self.padding[:, None, None, None, low:high]
            if self.causal:
                real = self.padding[:, self.first_position + start : self.first_position + stop]
                hidden = hidden | ~real[:, None, None, :, None]
        if self.mask is not None:
            hidden = hidden | ~self.mask[..., start:stop, low:high]
        return hidden
