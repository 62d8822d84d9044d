"""One process, and what several of them are told. That they share work is tested with the methods that do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from accelerate import PartialState

from gatelens import GatelensError
from gatelens.runtime.context import Context
from gatelens.runtime.journal import Journal
from gatelens.runtime.processes import Processes, default_device
from gatelens.runtime.rank import is_main


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "1")
    yield
    PartialState._reset_state()


def test_a_process_that_is_alone_has_all_rows() -> None:
    alone = Processes(torch.device("cpu"))
    assert alone.share(3) == [0, 1, 2]
    rows = torch.rand(3, 2)
    assert torch.equal(torch.stack(alone.gather(rows, 3)), rows)
    with alone.main_first():
        alone.wait()
    assert is_main()


def test_a_process_that_is_alone_reports_each_piece_once() -> None:
    reported: list[tuple[str, int, int]] = []
    journal = Journal(progress=lambda *progress: reported.append(progress))
    context = Context(journal=journal, processes=Processes(torch.device("cpu")))
    context.begin("work", 2)
    context.pieces([("a", lambda: torch.ones(1)), ("b", lambda: torch.ones(1))])
    assert reported == [("work", 0, 2), ("work", 1, 2), ("work", 2, 2)]


def test_rows_that_are_not_the_share_are_not_gathered() -> None:
    with pytest.raises(ValueError, match="zip"):
        Processes(torch.device("cpu")).gather(torch.rand(2, 2), 3)


def test_each_process_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch, one_of_two: None) -> None:
    assert default_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert default_device() == default_device("cuda") == torch.device("cuda", 1)
    assert default_device("cuda:3") == torch.device("cuda", 3)  # as asked
    monkeypatch.delenv("LOCAL_RANK")
    assert default_device() == torch.device("cuda")
    assert not is_main()


def test_processes_that_cannot_be_connected_are_refused(monkeypatch: pytest.MonkeyPatch, one_of_two: None) -> None:
    monkeypatch.delenv("LOCAL_RANK")  # with which torch would wait for the other process
    with pytest.raises(GatelensError, match=r"one of 2 processes.*on the device mps: start one process"):
        Processes(torch.device("mps"))
