"""Rows shared out between processes, when there are several (``accelerate launch``)."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def n_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def my_rows(n: int) -> list[int]:
    """The rows that are this process's: every one if it is alone."""
    if n_processes() == 1:
        return list(range(n))
    from accelerate import PartialState

    state = PartialState()
    return list(range(n))[state.process_index :: state.num_processes]


def all_rows(mine: Tensor, n: int) -> Tensor:
    """The rows of all processes together, in order: (n, ...), the same everywhere."""
    if n_processes() == 1:
        return mine
    from accelerate.utils import gather_object

    parts: list[tuple[int, Tensor]] = gather_object(list(zip(my_rows(n), mine.cpu(), strict=True)))
    return torch.stack([row for _, row in sorted(parts, key=lambda part: part[0])])
