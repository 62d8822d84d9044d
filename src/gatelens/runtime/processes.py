"""Several processes at one run (``accelerate launch``): each does its share, and all know the whole.

What is shared out is a list of rows, such as seeds. Every process calls the same functions in the same order; one that
leaves out a call leaves the others waiting for it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from gatelens.errors import GatelensError

_PATIENCE = timedelta(days=30)  # a process may have more rows than another, and rows take hours


def n_processes() -> int:
    """How many processes were started together for this run."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process is the one that writes files and prints."""
    return int(os.environ.get("RANK", "0")) == 0


def my_device(device: str | torch.device | None = None) -> torch.device:
    """The device to load a model to; default: CUDA where there is one, else the CPU.

    Of several processes on one machine each has a GPU of its own, in the order in which accelerate gives them out.
    """
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda" and wanted.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % max(1, torch.cuda.device_count()))
    return wanted


class Processes:
    """All processes of this run, and which of them this one is. device: where the model is."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.count = 0, n_processes()
        self._state: Any = None
        if self.count > 1:
            self._state = _join(device, self.count)
            self.index = int(self._state.process_index)

    @property
    def name(self) -> str:
        """Of this process among all, as it says which rows are its share."""
        return f"{self.index}-of-{self.count}"

    def share(self, n: int) -> list[int]:
        """The rows, of n, that are this process's: every one if it is alone, none if there are too few."""
        return list(range(n))[self.index :: self.count]

    def gather(self, mine: Tensor, n: int) -> Tensor:
        """The rows of all processes in order, on the CPU: (n, ...), the same everywhere. mine: those of `share(n)`."""
        own = list(zip(self.share(n), mine.cpu(), strict=True))
        if self._state is None:
            return mine.cpu()
        from accelerate.utils import gather_object

        rows: dict[int, Tensor] = dict(gather_object(own))
        return torch.stack([rows[row] for row in range(n)])

    def wait(self) -> None:
        """Go on when all processes are here."""
        if self._state is not None:
            self._state.wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Let the main process do this before all others."""
        if not is_main():
            self.wait()
        yield
        if is_main():
            self.wait()


def _join(device: torch.device, count: int) -> Any:
    if importlib.util.find_spec("accelerate") is None:
        raise GatelensError("several processes need accelerate: run `pip install accelerate`, or start only one.")
    from accelerate import PartialState

    # Told of the CPU as sparsify's Accelerator is: by itself accelerate sees no other processes without a GPU.
    state = PartialState(cpu=device.type == "cpu", timeout=_PATIENCE)
    if state.num_processes != count:
        raise GatelensError(
            f"this is one of {count} processes, but accelerate does not connect them on the device {device.type}: "
            "start one process, or take the device cpu or cuda."
        )
    return state
