"""The folder of one run, from which a killed run resumes.

``asked.json``    what was asked, with the fingerprints of model and task. It is written first. Only the same request
                  can resume the folder.
``pieces/``       finished pieces of work; removed at the end.
``.lock``         held by the process that works in the folder; the operating system releases it when that process ends.
``result.json``   the summary. It is written last: a folder that has it is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from filelock import FileLock, Timeout

from gatelens.errors import GatelensError
from gatelens.runtime.context import MEMORY_GB, Context
from gatelens.runtime.files import make_folder, read_json, remove_half_written, write_json, writing
from gatelens.runtime.interrupts import Interrupted
from gatelens.runtime.journal import Clock, Journal, Progress
from gatelens.runtime.processes import Processes
from gatelens.runtime.rank import is_main
from gatelens.runtime.settings import Settings
from gatelens.runtime.versions import versions

ASKED, RESULT, PIECES, LOCK = "asked.json", "result.json", "pieces", ".lock"


def request(kind: str, model: Mapping[str, Any], settings: Settings, **tasks: Any) -> dict[str, Any]:
    """What is asked of a job, as plain JSON: its kind, the model, its tasks and settings, and the versions of the code.

    Arguments:
        kind: the name of the job.
        model: what identifies the model (`Model.identity()`).
        tasks: what identifies the tasks, by the name under which the request holds them.
    """
    asked = {"kind": kind, "model": model, **tasks, "settings": settings.identity(), "versions": versions()}
    plain: dict[str, Any] = json.loads(json.dumps(asked))
    return plain


def is_finished(folder: Path) -> bool:
    """Whether a folder holds the result of a run."""
    return (folder / RESULT).exists()


class RunFolder:
    """Claims a folder for one request, holds its lock, holds its pieces and clock, and finishes it.

    Example:
        with RunFolder(out, request("circuit", model.identity(), settings, task=task.spec()), progress) as run:
            if run.complete:
                return load_circuit(run.path)
            scores = attribute(HEADS, model, task, context=run.context())
            run.finish({"count": 12})

    Without a folder (``out=None``) the same code runs, and nothing is saved.

    Arguments:
        out: the folder, or None.
        asked: the request (`request`). A folder that holds the work of another request raises an error, so that two
            runs never mix.
        progress: is called after every finished piece.
        processes: all processes of this run, if there are several. The main one claims the folder and writes to it.
    """

    def __init__(
        self,
        out: str | Path | None,
        asked: Mapping[str, Any],
        progress: Progress | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.path = None if out is None else Path(out)
        self.asked, self.processes = asked, processes
        self.complete = False
        self._is_new = False  # whether this start wrote the request
        self._lock = None if self.path is None else FileLock(self.path / LOCK)
        self._claimed: tuple[int, int] | None = None  # the lock file of this start, as the file system knows it
        self._clock = Clock(None if self.path is None else self.path / PIECES, progress)

    def __enter__(self) -> Self:
        if self.path is not None:
            try:
                if self.processes is None:
                    self._claim(self.path)
                else:
                    with self.processes.main_first():
                        self._claim(self.path)
            except BaseException:  # Python does not call __exit__ then
                self._release_lock(remove=False)
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # An interruption becomes one that says where the run stopped.
        self._release_lock(remove=self.complete)
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            raise Interrupted(self._clock.reached, resumes=self.path is not None) from error

    @property
    def seconds(self) -> float:
        """How long the run took so far, including earlier starts that were killed."""
        return self._clock.seconds

    def context(self, memory_gb: float = MEMORY_GB, name: str = "") -> Context:
        """The execution context of this run, or of the part of it with this name."""
        folder = None if self.path is None else self.path / PIECES / name
        return Context(memory_gb, Journal(folder, self._clock if is_main() else None, check=self.check_claim))

    def check_claim(self) -> None:
        """Raise an error if somebody has removed the folder since this start claimed it.

        Another run may have claimed a folder of the same name since then: the two must not mix.
        """
        if self.path is None:
            return
        with writing(self.path):
            is_the_same = self._claimed == _identity(self.path / LOCK)
        if not is_the_same:
            raise GatelensError(
                f"{self.path} was removed while this run worked in it, so that the run cannot be saved: run the same "
                "command again to start from the beginning."
            )

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write ``result.json`` and remove what was only needed to resume. All other files must be written before."""
        if self.path is not None and is_main():
            self.check_claim()
            write_json(self.path / RESULT, result)
            self._tidy(self.path)
        self.complete = True
        if self.processes is not None:
            self.processes.wait()

    def withdraw(self) -> None:
        """Remove the request and the pieces of a run that turns out to be impossible, and the folder if it is empty.

        Nothing is removed if an earlier start wrote the request.
        """
        if self.path is None or not self._is_new or self._claimed != _identity(self.path / LOCK):
            return
        shutil.rmtree(self.path / PIECES, ignore_errors=True)
        (self.path / ASKED).unlink(missing_ok=True)
        self._release_lock(remove=True)
        with suppress(OSError):  # the folder held other files before
            self.path.rmdir()

    def _claim(self, path: Path) -> None:
        make_folder(path)
        self._refuse_another(path)
        self.complete = self._is_finished(path)
        if is_main() and not self.complete:
            self._take_lock(path)
            self._refuse_another(path)  # another process may have begun a run in the meantime,
            self.complete = self._is_finished(path)  # and finished it
            self._write_request(path)
        elif is_main() and ((path / PIECES).exists() or (path / LOCK).exists()):
            with suppress(GatelensError):  # the process that finished it may be tidying up itself
                self._take_lock(path)
                self._tidy(path)
        self._claimed = _identity(path / LOCK)

    def _tidy(self, path: Path) -> None:
        """Remove what was only needed to resume, and what a process that was killed had half-written."""
        shutil.rmtree(path / PIECES, ignore_errors=True)
        remove_half_written(path)

    def _refuse_another(self, path: Path) -> None:
        """Raise an error if the folder holds other files, or the run of another request."""
        if is_marked(path, ASKED, "a run of gatelens"):
            refuse_another_request(path, read_json(path / ASKED), self.asked)

    def _is_finished(self, path: Path) -> bool:
        return is_finished(path)

    def _write_request(self, path: Path) -> None:
        if not (path / ASKED).exists():
            write_json(path / ASKED, self.asked)
            self._is_new = True

    def _take_lock(self, path: Path) -> None:
        assert self._lock is not None
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise GatelensError(
                f"another process is working in {path}: wait until it ends, or give another folder."
            ) from error
        except OSError as error:
            raise GatelensError(f"cannot write to {path} ({error.strerror}): give another folder.") from error

    def _release_lock(self, remove: bool) -> None:
        if self._lock is not None and self._lock.is_locked:
            self._lock.release()
            if remove and self.path is not None:
                with suppress(OSError):  # the result is complete: a lock file that stays does no harm
                    (self.path / LOCK).unlink(missing_ok=True)


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from a later one with the same name; None if there is no file."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def is_marked(folder: Path, mark: str, kind: str) -> bool:
    """Whether a folder holds its mark. Raise an error if it does not, and holds other files.

    The files are listed before the mark is looked for, because another process may write the mark, and then other
    files, at the same time.

    Arguments:
        mark: the name of what is written first into every folder of this kind.
        kind: what such a folder is, for the error.
    """
    files = list(folder.iterdir())
    if (folder / mark).exists():
        return True
    if any(file.suffix != ".tmp" and file.name != LOCK for file in files):
        raise GatelensError(f"{folder} holds other files and not {kind}: give an empty folder or a new one.")
    return False


def refuse_another_request(folder: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Raise an error that names what differs if a folder was made for another request.

    Arguments:
        folder: the run folder.
        saved: the request that the folder was made for.
        asked: the request that is made now.
    """
    if saved == asked:
        return
    if saved.get("kind") != asked.get("kind"):  # then most settings differ, and say nothing
        raise GatelensError(
            f"{folder} holds a run of `gatelens {saved.get('kind')}`, not of `gatelens {asked.get('kind')}`: give "
            "another folder."
        )
    # The settings repeat some of what describes the task, such as its number of prompts.
    differing = {(name.split()[-1], str(old), str(new)): name for name, old, new in _differences(saved, asked)}
    parts = [f"{name} {old}, not {new}" for (_, old, new), name in differing.items()]
    if not parts:  # only fingerprints differ
        changed = [key for key in sorted({*asked, *saved}) if asked.get(key) != saved.get(key)]
        parts = [_OTHER.get(key, f"another {key}") for key in changed]
    more = f" and {len(parts) - _SHOWN} more that differ" if len(parts) > _SHOWN else ""
    raise GatelensError(
        f"{folder} holds a run with {'; '.join(parts[:_SHOWN])}{more}: repeat the first request to resume it, or give "
        "another folder."
    )


_SHOWN = 4
_OTHER = {"model": "other weights of the model", "task": "other prompts", "tasks": "other prompts"}


def _differences(old: Any, new: Any, name: str = "") -> list[tuple[str, Any, Any]]:
    """All settings that differ: the name of each, and both values. Fingerprints are left out."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and "fingerprint" not in key]
        return [found for key in keys for found in _differences(old.get(key), new.get(key), _joined(name, key))]
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = zip(old, new, strict=True)
        return [found for before, after in pairs if before != after for found in _differences(before, after, name)]
    return [(name, "none" if old is None else old, "none" if new is None else new)]


def _joined(name: str, key: str) -> str:
    """The name of a setting within a request: the section "settings" and the key "name" need not be said."""
    return key if name in ("", "settings") else name if key == "name" else f"{name} {key}"
