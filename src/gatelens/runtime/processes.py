"""Several processes that work on one run (``accelerate launch``): each does its share, and all get the whole result.

The work is a list of items, such as seeds. Every process must call the same functions in the same order: if one
process leaves out a call, the others wait for it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.rank import is_main, n_processes

_TIMEOUT = timedelta(days=30)  # a process may have more items than another, and an item may take hours


def default_device(device: str | torch.device | None = None) -> torch.device:
    """The device to load a model to: CUDA if there is one and no other device is asked for, otherwise the CPU.

    If several processes run on one machine, each gets its own GPU, in the order in which accelerate assigns them.
    """
    chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if chosen.type == "cuda" and chosen.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    return chosen


class Processes:
    """All processes of this run, and the place of this process among them.

    Arguments:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self.index, self.count = 0, n_processes()
        self._state: Any = None
        if self.count > 1:
            self._state = _connect(device, self.count)
            self.index = int(self._state.process_index)

    @property
    def name(self) -> str:
        """The name of this process's share of the work, such as ``0-of-2``."""
        return f"{self.index}-of-{self.count}"

    def share(self, n: int) -> list[int]:
        """Which of n items this process works on. It may be none of them if there are more processes than items."""
        return list(range(n))[self.index :: self.count]

    def gather(self, own: Sequence[Tensor], n: int) -> list[Tensor]:
        """The items of all processes in order, on the CPU, the same in every process.

        Arguments:
            own: this process's items, in the order of ``share(n)``. Their shapes may differ.
            n: the number of items of all processes.
        """
        numbered = [(number, item.cpu()) for number, item in zip(self.share(n), own, strict=True)]
        if self._state is not None:
            from accelerate.utils import gather_object

            numbered = gather_object(numbered)
        items = dict(numbered)
        return [items[number] for number in range(n)]

    def wait(self) -> None:
        """Return when all processes have called this."""
        if self._state is not None:
            self._state.wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Run the block in the main process first, and then in all others."""
        if not is_main():
            self.wait()
        yield
        if is_main():
            self.wait()


def _connect(device: torch.device, count: int) -> Any:
    if importlib.util.find_spec("accelerate") is None:
        raise GatelensError("several processes need accelerate: run `pip install accelerate`, or start one process.")
    from accelerate import PartialState

    # accelerate connects processes without a GPU only if it is told that the device is the CPU.
    state = PartialState(cpu=device.type == "cpu", timeout=_TIMEOUT)
    if state.num_processes != count:
        raise GatelensError(
            f"this is one of {count} processes, but accelerate does not connect processes on the device {device.type}: "
            "start one process, or use the device cpu or cuda."
        )
    return state
