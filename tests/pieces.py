"""A job that is broken off after every piece that it saves, and started again until it is finished."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

from gatelens.runtime.journal import Journal

_Result = TypeVar("_Result")


def finish_in_pieces(job: Callable[[], _Result], starts: int) -> tuple[_Result, list[str]]:
    """Start a job again and again; each start is broken off at its first new piece.

    Arguments:
        starts: how often it may be started; a job that is not finished then fails the test.

    Returns:
        What the job returned, and the paths of the pieces in the order in which they were written. A piece that was
        computed twice is there twice.
    """
    keep, written = Journal.keep, list[str]()

    def keep_and_stop(self: Journal, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        keep(self, name, tensors)
        written.append(f"{self.folder}/{self.prefix}{name}")
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Journal, "keep", keep_and_stop)
        for _ in range(starts):
            try:
                return job(), written
            except KeyboardInterrupt:
                pass
    pytest.fail(f"not finished after {starts} starts")
