"""Pieces of work: computed once, kept as they are."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.journal import Clock, Journal


def refuse() -> Tensor:
    raise AssertionError("computed again")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.int64])
def test_a_piece_comes_back_to_the_last_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = (torch.randn(3, 4) * 5).to(dtype).T  # not contiguous
    first = Journal(tmp_path / "new" / "folder").piece("a", lambda: value)
    again = Journal(tmp_path / "new" / "folder").piece("a", refuse)
    assert torch.equal(first, value)
    assert torch.equal(again, value)
    assert again.dtype == dtype


def test_parts_and_names_do_not_meet(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for n, one in enumerate((journal, journal.part("x"), journal.part("x").part("y"))):
        one.piece("a", lambda n=n: torch.tensor(n))
        one.piece("b.1", lambda n=n: torch.tensor(10 + n))
        one.piece("b.2", lambda n=n: torch.tensor(20 + n))
    for n, one in enumerate((journal, journal.part("x"), journal.part("x").part("y"))):
        assert [int(one.piece(name, refuse)) for name in ("a", "b.1", "b.2")] == [n, 10 + n, 20 + n]


def test_without_a_folder_nothing_is_kept() -> None:
    journal = Journal()
    assert [int(journal.piece("a", lambda n=n: torch.tensor(n))) for n in (1, 2)] == [1, 2]


def test_a_damaged_piece_is_computed_again(tmp_path: Path) -> None:
    Journal(tmp_path).piece("a", lambda: torch.ones(100))
    [path] = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:50])
    assert Journal(tmp_path).piece("a", lambda: torch.zeros(2)).tolist() == [0, 0]
    assert Journal(tmp_path).piece("a", refuse).tolist() == [0, 0]


def test_a_piece_of_another_shape_is_computed_again(tmp_path: Path) -> None:
    Journal(tmp_path).piece("a", lambda: torch.ones(1))
    assert Journal(tmp_path).piece("a", lambda: torch.zeros(2), (2,)).tolist() == [0, 0]
    assert Journal(tmp_path).piece("a", refuse, (2,)).tolist() == [0, 0]


def test_the_latest_state_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "new")
    assert journal.kept("state.") == []
    for n in (1, 2):
        journal.keep("state.0-of-2", {"a": torch.tensor(n), "b": torch.tensor(10 * n)})
    journal.keep("state.1-of-2", {"c": torch.tensor(3)})
    journal.keep("states", {"a": torch.tensor(4)})
    journal.part("x").keep("state.0-of-2", {"a": torch.tensor(5)})
    assert Journal(tmp_path / "new").kept("state.") == [{"a": 2, "b": 20}, {"c": 3}]
    assert len(list((tmp_path / "new").iterdir())) == 4


def test_an_error_leaves_no_piece(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        Journal(tmp_path).piece("a", refuse)
    assert not list(tmp_path.iterdir())


def test_what_a_killed_run_was_writing_is_no_piece(tmp_path: Path) -> None:
    (tmp_path / "a.77.tmp").write_bytes(b"half")
    assert Journal(tmp_path).piece("a", lambda: torch.tensor(3)).item() == 3


def test_progress(tmp_path: Path) -> None:
    said: list[tuple[str, int, int]] = []
    journal = Journal(tmp_path, lambda *what: said.append(what)).part("p")
    journal.begin("score", 2)
    journal.piece("a", lambda: torch.ones(1))
    journal.piece("a", refuse)
    assert said == [("p: score", 0, 2), ("p: score", 1, 2), ("p: score", 2, 2)]


def test_a_full_disk(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: the system refuses the write half-way."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        with pytest.raises(GatelensError, match=r"cannot write to .* free some disk space"):
            Journal(tmp_path).piece("a", lambda: torch.zeros(1_000_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_the_clock_of_a_run_goes_on_where_its_earlier_start_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr("gatelens.runtime.journal.time.monotonic", lambda: now)
    said: list[object] = []
    first = Clock(tmp_path / "pieces", lambda *what: said.append(what))
    journal = Journal(tmp_path / "pieces" / "seed-0", first)
    now = 107.0
    journal.piece("a", lambda: torch.zeros(1))
    now = 150.0  # killed here: nothing was kept since 107
    again = Clock(tmp_path / "pieces")
    assert again.seconds == 7.0
    now = 152.0
    assert again.seconds == 9.0
    assert said == [("", 1, 0)]
    (tmp_path / "pieces" / "seconds.json").write_text("[]")
    assert Clock(tmp_path / "pieces").seconds == 0.0
    assert Clock().seconds == 0.0
