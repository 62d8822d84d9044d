"""A run folder: claimed for one request, locked by one process, resumed, and complete in the end."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from filelock import FileLock

from gatelens.errors import GatelensError
from gatelens.runtime.context import Context
from gatelens.runtime.files import read_json, write_json
from gatelens.runtime.run_folder import RunFolder, refuse_another_request

ASKED = {"kind": "test", "settings": {"n": 1}}


def test_a_finished_folder_is_complete_and_holds_no_leftovers(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "deep" / "run", ASKED) as run:
        assert not run.complete
        run.context().piece("a", lambda: torch.ones(2))
        (tmp_path / "deep" / "run" / ".result.json.1.tmp").touch()  # left by a process that was killed
        run.finish({"count": 3})
    assert sorted(path.name for path in (tmp_path / "deep" / "run").iterdir()) == ["asked.json", "result.json"]
    with RunFolder(tmp_path / "deep" / "run", ASKED) as again:
        assert again.complete
    assert read_json(tmp_path / "deep" / "run" / "result.json") == {"count": 3}


def test_a_run_that_was_interrupted_resumes_with_its_pieces(tmp_path: Path) -> None:
    def stop_half_way() -> None:
        with RunFolder(tmp_path, ASKED) as run:
            run.context().piece("a", lambda: torch.ones(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stop_half_way()
    with RunFolder(tmp_path, ASKED) as again:
        assert not again.complete
        assert again.context().piece("a", lambda: torch.zeros(2)).tolist() == [1, 1]


def test_another_request_is_refused_and_the_difference_is_named(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ASKED):
        pass
    with pytest.raises(GatelensError, match=r"holds a run with n 1, not 2: repeat the first request"):
        RunFolder(tmp_path, {**ASKED, "settings": {"n": 2}}).__enter__()


def test_other_files_are_refused_and_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(GatelensError, match="holds other files"):
        RunFolder(tmp_path, ASKED).__enter__()
    assert (tmp_path / "mine.txt").read_text() == "mine"
    with pytest.raises(GatelensError, match="is a file"):
        RunFolder(tmp_path / "mine.txt", ASKED).__enter__()


def test_what_a_killed_start_left_does_not_count_as_other_files(tmp_path: Path) -> None:
    (tmp_path / ".asked.json.123.tmp").write_text("{")
    with RunFolder(tmp_path, ASKED) as run:
        assert not run.complete


def test_a_folder_below_a_file_and_a_damaged_request(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(GatelensError, match="cannot write to"):
        RunFolder(tmp_path / "file" / "folder", ASKED).__enter__()
    (tmp_path / "file").unlink()
    (tmp_path / "asked.json").write_text("{")
    with pytest.raises(GatelensError, match="the folder is damaged"):
        RunFolder(tmp_path, ASKED).__enter__()


def test_a_refused_request_changes_nothing_in_the_folder(tmp_path: Path) -> None:
    with RunFolder(tmp_path, ASKED) as run:
        run.finish({})
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(GatelensError, match="give another folder"):
        RunFolder(tmp_path, {**ASKED, "kind": "other"}).__enter__()
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.slow
def test_two_processes_are_kept_apart(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom gatelens.errors import GatelensError\nfrom gatelens.runtime.run_folder import RunFolder\n"
        "try: RunFolder(sys.argv[1], {'kind': 'test', 'settings': {'n': 1}}).__enter__()\n"
        "except GatelensError as error: print(error)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with RunFolder(tmp_path, ASKED):
        refused = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "another process is working in" in refused
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""


@pytest.mark.parametrize("works", [True, False], ids=["still works", "was killed"])
def test_a_run_that_another_process_begins_meanwhile(
    works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process writes its request and a piece just after this one has looked for a request."""
    exists = Path.exists

    def begun_meanwhile(path: Path) -> bool:
        there = exists(path)
        if path == tmp_path / "asked.json" and not there:
            write_json(path, {"kind": "test", "settings": {"n": 2}})
            (tmp_path / "pieces").mkdir()
        return there

    monkeypatch.setattr(Path, "exists", begun_meanwhile)
    message = "another process is working in" if works else "holds a run with n 2, not 1"
    lock = FileLock(tmp_path / ".lock") if works else nullcontext()
    with lock, pytest.raises(GatelensError, match=message), RunFolder(tmp_path, ASKED):
        pass


def test_without_a_folder_nothing_is_kept() -> None:
    with RunFolder(None, ASKED) as run:
        assert run.context().piece("a", lambda: torch.ones(1)).tolist() == [1]
        run.finish({})
    assert run.complete


@pytest.mark.parametrize("again", [False, True], ids=["removed", "claimed by another run"])
def test_a_folder_that_is_removed_during_the_run(again: bool, tmp_path: Path) -> None:
    """What the run does next is not written, neither into a new folder nor between the files of another run."""
    out = tmp_path / "out"
    with RunFolder(out, ASKED) as run:
        run.context().piece("a", lambda: torch.ones(1))
        shutil.rmtree(out)
        with RunFolder(out, {**ASKED, "settings": {"n": 2}}) if again else nullcontext() as other:
            files = sorted(path.name for path in tmp_path.rglob("*"))
            for work in (
                lambda: run.context().piece("b", lambda: torch.ones(1)),
                lambda: run.context(name="part").part("more").piece("c", lambda: torch.ones(1)),
                lambda: run.finish({}),
            ):
                with pytest.raises(GatelensError, match="out was removed while this run worked in it"):
                    work()
            run.withdraw()
            assert sorted(path.name for path in tmp_path.rglob("*")) == files
            if other is not None:
                other.finish({"n": 2})
    assert out.exists() == again


def test_a_folder_that_becomes_a_file_during_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "out", ASKED) as run:
        shutil.rmtree(tmp_path / "out")
        (tmp_path / "out").write_text("mine")
        with pytest.raises(GatelensError, match="out was removed while this run worked in it"):
            run.finish({})
    assert (tmp_path / "out").read_text() == "mine"


def test_a_run_that_was_killed_after_its_result_is_tidied_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start removes what is left, but not while another process holds the lock."""

    def killed(path: Path, **_: Any) -> None:
        raise KeyboardInterrupt

    def finish() -> None:
        with RunFolder(tmp_path, ASKED) as run, monkeypatch.context() as patch:
            run.context().piece("a", lambda: torch.ones(1))
            patch.setattr("gatelens.runtime.run_folder.shutil.rmtree", killed)
            run.finish({})

    with pytest.raises(KeyboardInterrupt):
        finish()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [".lock", "asked.json", "pieces", "result.json"]
    with FileLock(tmp_path / ".lock"), RunFolder(tmp_path, ASKED) as again:
        assert again.complete
        assert (tmp_path / "pieces" / "a.safetensors").exists()
    with RunFolder(tmp_path, ASKED) as again:
        assert again.complete
    assert sorted(path.name for path in tmp_path.iterdir()) == ["asked.json", "result.json"]


class TestContext:
    def test_the_budget_decides_how_many_items_fit(self) -> None:
        assert Context(memory_gb=1).fits(25_000_000) == 10
        assert Context(memory_gb=0.001).fits(25_000_000) == 1
        assert Context(memory_gb=float("inf")).fits(1) > 1 << 40
        assert len(torch.ones(3).split(Context(memory_gb=1e20).fits(1))) == 1  # torch takes no larger number

    @pytest.mark.parametrize("memory_gb", [0.0, -1.0, float("nan")])
    def test_a_budget_of_nothing_is_refused(self, memory_gb: float) -> None:
        with pytest.raises(GatelensError, match="memory_gb"):
            Context(memory_gb=memory_gb)


def test_a_request_is_withdrawn_by_the_start_that_made_it(tmp_path: Path) -> None:
    asked = {"kind": "test"}
    with RunFolder(tmp_path / "out", asked) as run:
        run.context().piece("a", lambda: torch.zeros(1))
        run.withdraw()
    assert not (tmp_path / "out").exists()
    with RunFolder(tmp_path / "out", asked) as run:
        run.context().piece("a", lambda: torch.zeros(1))
    with RunFolder(tmp_path / "out", asked) as run:
        run.withdraw()
    assert (tmp_path / "out" / "pieces" / "a.safetensors").exists()


class TestAnotherRequest:
    """The error names the settings that differ, not fingerprints."""

    SAVED: ClassVar[dict[str, Any]] = {
        "kind": "circuit",
        "model": {"name": "smollm2", "fingerprint": "a" * 64, "dtype": "float32"},
        "task": {"name": "ioi", "n": 8, "options": {"length": 4}, "fingerprints": ["b" * 64]},
        "settings": {"n": 8, "level": "heads"},
    }

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"settings": {"n": 9, "level": "heads"}}, "n 8, not 9"),
            ({"model": {"name": "gpt2", "fingerprint": "c" * 64, "dtype": "float32"}}, "model smollm2, not gpt2"),
            (
                {"task": {"name": "ioi", "n": 8, "options": {}, "fingerprints": ["d" * 64]}},
                "task options length 4, not none",
            ),
            (  # the number of prompts is in the task and in the settings, and is said once
                {
                    "task": {"name": "ioi", "n": 9, "options": {"length": 4}, "fingerprints": ["d" * 64]},
                    "settings": {"n": 9, "level": "edges"},
                },
                "n 8, not 9; level heads, not edges",
            ),
            ({"model": {"name": "smollm2", "fingerprint": "c" * 64, "dtype": "float32"}}, "other weights of the model"),
            (
                {"task": {"name": "ioi", "n": 8, "options": {"length": 4}, "fingerprints": ["d" * 64]}},
                "other prompts",
            ),
        ],
    )
    def test_says_what_differs(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(GatelensError) as error:
            refuse_another_request(Path("out"), self.SAVED, {**self.SAVED, **change})
        assert str(error.value) == (
            f"out holds a run with {message}: repeat the first request to resume it, or give another folder."
        )

    def test_another_job_is_named_without_its_settings(self) -> None:
        with pytest.raises(GatelensError) as error:
            refuse_another_request(Path("out"), self.SAVED, {**self.SAVED, "kind": "gate", "settings": {"updates": 9}})
        assert str(error.value) == (
            "out holds a run of `gatelens circuit`, not of `gatelens gate`: give another folder."
        )

    def test_the_same_request_is_accepted(self) -> None:
        refuse_another_request(Path("out"), self.SAVED, dict(self.SAVED))
