"""Several processes that run one study: they share its cells, and survive each other."""

from __future__ import annotations

import json
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from studies import LEVELS, go, hold, numbers, run_alone, run_and_say_when_waiting, run_until_killed, write_study

from gatelens.jobs.study._folder import StudyFolder
from gatelens.jobs.study.file import read_study

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning"),
    pytest.mark.usefixtures("no_report"),
]

# A process is forked from one that has done the imports, which take seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gatelens.jobs.study.run", "gatelens.report.page"])


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    process = FORKS.Process(target=target, args=args)
    process.start()
    return process


def end(process: BaseProcess, code: int = 0) -> None:
    process.join()
    assert process.exitcode == code


def wait_for(event: Any, process: BaseProcess) -> None:
    """Wait for an event that the process sets."""
    while not event.wait(0.1):
        assert process.is_alive() or event.is_set()


class TestProcesses:
    def test_killed_at_any_point_it_continues(self, place: Path, tmp_path: Path) -> None:
        file = write_study(place, circuit=LEVELS + "\nmemory_gb = 0.0001")
        out = place / "out"
        go(file, tmp_path / "whole")
        for cell in ("heads-induction-dense", "edges-induction-dense", "edges-induction-sparse"):
            end(start(run_until_killed, file, out, cell), -signal.SIGKILL)
            assert list(out.glob(f"cells/{cell}/pieces/**/*.safetensors"))
        end(start(run_alone, file, out))
        assert numbers(out) == numbers(tmp_path / "whole")

    def test_two_at_once_share_the_work(self, place: Path, tmp_path: Path) -> None:
        file = write_study(place, circuit='level = ["heads", "edges"]\nseed = [0, 1, 2]')
        both = [start(run_alone, file, place / "out") for _ in range(2)]
        for process in both:
            end(process)
        go(file, tmp_path / "alone")
        assert numbers(place / "out") == numbers(tmp_path / "alone")
        workers = {json.loads(path.read_text())["process"] for path in (place / "out" / "state").glob("*.json")}
        assert workers <= {process.pid for process in both}
        assert json.loads((place / "out" / "summary.json").read_text())["done"] == 12

    def test_a_cell_in_other_hands_is_waited_for(self, place: Path) -> None:
        """The second process takes the free cell, waits for the first's, and takes it over when that one is killed."""
        file = write_study(place)
        out = place / "out"
        StudyFolder(out).claim(read_study(file))
        held, waits = FORKS.Event(), FORKS.Event()
        first = start(hold, out / "state" / "heads-induction-dense.lock", held)
        wait_for(held, first)
        second = start(run_and_say_when_waiting, file, out, waits)
        wait_for(waits, second)
        assert (out / "cells" / "heads-induction-sparse" / "result.json").exists()
        assert not (out / "cells" / "heads-induction-dense").exists()
        first.kill()
        end(first, -signal.SIGKILL)
        end(second)
        assert (out / "cells" / "heads-induction-dense" / "result.json").exists()
