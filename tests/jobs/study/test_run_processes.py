"""Several processes that run one study: they share its cells, and survive each other."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from studies import LEVELS, go, hold, numbers, run_alone, write_study

from gatelens.jobs.study._folder import StudyFolder
from gatelens.jobs.study.file import read_study

pytestmark = [
    pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning"),
    pytest.mark.usefixtures("no_report"),
]

# A process is forked from one that has done the imports, which take seconds.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["gatelens.jobs.study.run", "gatelens.report.page"])


def start(file: Path, out: Path) -> BaseProcess:
    process = FORKS.Process(target=run_alone, args=(file, out))
    process.start()
    return process


def end(process: BaseProcess, code: int = 0) -> None:
    process.join()
    assert process.exitcode == code


def wait_until(condition: Any, process: BaseProcess) -> None:
    while not condition():
        assert process.is_alive()
        time.sleep(0.005)


class TestProcesses:
    def test_killed_at_any_point_it_continues(self, place: Path, tmp_path: Path) -> None:
        file = write_study(place, circuit=LEVELS + "\nmemory_gb = 0.0001")
        out = place / "out"
        go(file, tmp_path / "whole")
        for condition in (
            lambda: list(out.glob("cells/*/pieces/**/*.safetensors")),
            lambda: list(out.glob("state/edges-induction-dense.json")),
            lambda: list(out.glob("cells/edges-induction-sparse/pieces/**/*.safetensors")),
        ):
            process = start(file, out)
            wait_until(condition, process)
            process.kill()
            end(process, -signal.SIGKILL)
        end(start(file, out))
        assert numbers(out) == numbers(tmp_path / "whole")

    def test_two_at_once_share_the_work(self, place: Path, tmp_path: Path) -> None:
        file = write_study(place, circuit='level = ["heads", "edges"]\nseed = [0, 1, 2]')
        both = [start(file, place / "out") for _ in range(2)]
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
        held = FORKS.Event()
        first = FORKS.Process(target=hold, args=(out / "state" / "heads-induction-dense.lock", held))
        first.start()
        wait_until(held.is_set, first)
        second = start(file, out)
        wait_until(lambda: (out / "cells" / "heads-induction-sparse" / "result.json").exists(), second)
        time.sleep(0.3)
        assert second.is_alive()
        assert not (out / "cells" / "heads-induction-dense").exists()
        first.kill()
        end(first, -signal.SIGKILL)
        end(second)
        assert (out / "cells" / "heads-induction-dense" / "result.json").exists()
