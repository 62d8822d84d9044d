"""A circuit for tests to start as several processes: accelerate launch ... circuit_run.py OUT MODEL."""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gatelens.cli import make_app
from gatelens.runtime.journal import Journal
from gatelens.runtime.processes import Processes

N, SAMPLE, POINTS = 6, 16, 4


class Stop(Exception):
    pass


@contextmanager
def stopping_in(phase: str) -> Iterator[None]:
    """Stop this process after its first piece of a phase."""
    reach = Journal.reach

    def reach_and_stop(self: Journal, done: int) -> None:
        reach(self, done)
        if phase in self.title and done:
            raise Stop

    Journal.reach = reach_and_stop  # type: ignore[method-assign]
    try:
        yield
    finally:
        Journal.reach = reach  # type: ignore[method-assign]


def find(folder: Path, model: str) -> None:
    """Find the circuit, or resume the run in the folder."""
    sizes = ["--n", str(N), "--sample", str(SAMPLE), "--points", str(POINTS), "--level", "edges", "--allow-noise"]
    command = ["circuit", model, "ioi", "--out", str(folder), "--stability", "1", "--tests", *sizes]
    make_app("circuit")(args=command, standalone_mode=False)


def main(out: Path, model: str) -> None:
    processes = Processes(torch.device("cpu"))
    with suppress(Stop), stopping_in("edges kept"):
        find(out / "run", model)
    processes.wait()
    if processes.index == 0:
        pieces = (out / "run" / "pieces").rglob("*.safetensors")
        (out / "stopped.json").write_text(json.dumps(sorted(path.name for path in pieces)))
        shutil.copytree(out / "run", out / "for-one")
    processes.wait()
    find(out / "run", model)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]), sys.argv[2])
