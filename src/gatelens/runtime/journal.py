"""Work in pieces: each finished piece is saved, so that a killed run resumes where it stopped.

A method asks its journal for every piece by name. The journal computes the piece, or reads it from the folder where an
earlier run left it. Numbers are stored exactly, so both ways give the same results. Work that proceeds step by step
saves its latest state instead, in one file: a kill leaves either the old state or the new one. Without a folder nothing
is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.files import make_folder, read_json, write_json, write_tensors

Progress = Callable[[str, int, int], None]
"""Called as progress(title, done, total) after each piece or step."""


class Clock:
    """Measures how long a run takes, including earlier starts. A killed start counts up to its last piece or step.

    Arguments:
        folder: the folder of the pieces.
        progress: is called whenever the clock is called. Pass the clock to journals as their ``progress``.
    """

    def __init__(self, folder: Path | None = None, progress: Progress | None = None) -> None:
        self._path, self._progress = None if folder is None else folder / "seconds.json", progress
        self._start = time.monotonic() - self._earlier_seconds()
        self.reached = ""  # the piece or step that was reported last

    @property
    def seconds(self) -> float:
        """How long the run took so far."""
        return time.monotonic() - self._start

    def __call__(self, title: str, done: int, total: int) -> None:
        self.reached = f"{title}, {done} of {total}"
        if self._path is not None and self._path.parent.is_dir():
            with suppress(OSError):  # if the disk is full, writing the next piece raises the error
                write_json(self._path, {"seconds": self.seconds})
        if self._progress is not None:
            self._progress(title, done, total)

    def _earlier_seconds(self) -> float:
        if self._path is None or not self._path.exists():
            return 0.0
        with suppress(GatelensError, KeyError, TypeError, ValueError):  # the file was damaged from outside
            return max(0.0, float(read_json(self._path)["seconds"]))
        return 0.0


class Journal:
    """The pieces of one run.

    Arguments:
        folder: where the pieces are saved; None saves nothing.
        progress: is called after every piece.
        prefix: the start of the name of every piece, and of the title of every phase.
        check: is called before every piece is saved. It raises an error if the folder is not this run's any more.
    """

    def __init__(
        self,
        folder: Path | None = None,
        progress: Progress | None = None,
        prefix: str = "",
        check: Callable[[], None] | None = None,
    ) -> None:
        self.folder, self.progress, self.prefix, self.check = folder, progress, prefix, check
        self.title, self.done, self.total = "", 0, 0

    def part(self, name: str) -> Journal:
        """A journal for one part of the work, in the same folder."""
        return Journal(self.folder, self.progress, f"{self.prefix}{name}.", self.check)

    def begin(self, title: str, total: int) -> None:
        """Announce the next phase of the work and its number of pieces or steps."""
        self.title, self.total = title, total
        self.reach(0)

    def reach(self, done: int) -> None:
        """Report how many pieces or steps are done."""
        self.done = done
        if self.progress is not None:
            part = self.prefix.replace("-", " ").replace(".", ": ")
            self.progress(f"{part}{self.title}", self.done, self.total)

    def piece(self, name: str, compute: Callable[[], Tensor], shape: tuple[int, ...] | None = None) -> Tensor:
        """The piece with this name: read from the folder if it is there, otherwise computed and saved.

        Arguments:
            compute: computes the piece.
            shape: if given, a saved piece of another shape is computed again.
        """
        value = None if self.folder is None else _read(self._path(name)).get("piece")
        if value is None or shape not in (None, tuple(value.shape)):
            value = compute().detach().cpu().contiguous()
            self.keep(name, {"piece": value})
        self.reach(self.done + 1)
        return value

    def kept(self, start: str) -> list[dict[str, Tensor]]:
        """All saved tensors whose names begin with ``start``, including those that other processes saved."""
        if self.folder is None or not self.folder.is_dir():
            return []
        paths = sorted(path for path in self.folder.iterdir() if path.suffix == ".safetensors")
        return [_read(path) for path in paths if path.name.startswith(f"{self.prefix}{start}")]

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Save these tensors under this name. Tensors that were saved under it before are replaced."""
        if self.folder is None:
            return
        if self.check is not None:
            self.check()
        make_folder(self.folder)
        write_tensors(self._path(name), tensors)

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.prefix}{name}.safetensors"


class StateSaver:
    """Saves the state of work that proceeds step by step, after 25 steps or 15 seconds, whichever comes first.

    Arguments:
        name: the name under which the journal keeps the state.
        done: how many steps were done before.
    """

    STEPS, SECONDS = 25, 15.0

    def __init__(self, journal: Journal, name: str, done: int) -> None:
        self.journal, self.name = journal, name
        self._done, self._at = done, time.monotonic()

    def step(self, done: int, state: Callable[[], Mapping[str, Tensor]], at_once: bool = False) -> None:
        """Save the state if it is time, or at once.

        Arguments:
            done: how many steps are done.
            state: the tensors to save.
        """
        if at_once or done - self._done >= self.STEPS or time.monotonic() - self._at >= self.SECONDS:
            self.journal.keep(self.name, state())
            self._done, self._at = done, time.monotonic()


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):  # absent, or damaged from outside: the piece is computed again
        return {}
