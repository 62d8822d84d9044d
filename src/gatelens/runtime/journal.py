"""Work in pieces: each finished piece is kept, so that a run that was killed continues where it was.

A method asks its journal for every piece by name. The journal computes it, or reads it from the folder where an
earlier run left it; numbers are stored as they are, so both ways end with the same results. Work that goes on step by
step keeps its latest state instead, all of it in one file: a kill leaves the old one or the new one. Without a folder
nothing is kept.
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
from gatelens.runtime.files import about_files, read_json, write_json, write_tensors

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total) after each piece or step."""


class Clock:
    """How long a run takes, its earlier starts included; one that was killed counts up to its last piece or step.

    folder: that of the pieces. Give the clock to journals as their progress; it passes on what it is told.
    """

    def __init__(self, folder: Path | None = None, progress: Progress | None = None) -> None:
        self._path, self._progress = None if folder is None else folder / "seconds.json", progress
        self._begun = time.monotonic() - self._earlier()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._begun

    def __call__(self, what: str, done: int, total: int) -> None:
        if self._path is not None and self._path.parent.is_dir():
            with suppress(OSError):  # of a full disk the pieces tell
                write_json(self._path, {"seconds": self.seconds})
        if self._progress is not None:
            self._progress(what, done, total)

    def _earlier(self) -> float:
        if self._path is None or not self._path.exists():
            return 0.0
        with suppress(GatelensError, KeyError, TypeError, ValueError):  # damaged from outside
            return max(0.0, float(read_json(self._path)["seconds"]))
        return 0.0


class Journal:
    """The pieces of one run."""

    def __init__(self, folder: Path | None = None, progress: Progress | None = None, prefix: str = "") -> None:
        self.folder, self.progress, self.prefix = folder, progress, prefix
        self.what, self.done, self.total = "", 0, 0

    def part(self, name: str) -> Journal:
        """A journal for one part of the work, in the same folder."""
        return Journal(self.folder, self.progress, f"{self.prefix}{name}.")

    def begin(self, what: str, total: int) -> None:
        """Say what comes next and in how many pieces or steps."""
        self.what, self.total = what, total
        self.reach(0)

    def reach(self, done: int) -> None:
        """Say how many pieces or steps are done."""
        self.done = done
        if self.progress is not None:
            self.progress(f"{self.prefix}{self.what}", self.done, self.total)

    def piece(self, name: str, compute: Callable[[], Tensor], shape: tuple[int, ...] | None = None) -> Tensor:
        """The piece of this name: from the folder if it is there (and of this shape), else computed and kept."""
        value = None if self.folder is None else _read(self._path(name)).get("piece")
        if value is None or shape not in (None, tuple(value.shape)):
            value = compute().detach().cpu().contiguous()
            self.keep(name, {"piece": value})
        self.reach(self.done + 1)
        return value

    def kept(self, start: str) -> list[dict[str, Tensor]]:
        """Everything that was kept under names that start so, also by other processes."""
        if self.folder is None or not self.folder.is_dir():
            return []
        paths = sorted(path for path in self.folder.iterdir() if path.suffix == ".safetensors")
        return [_read(path) for path in paths if path.name.startswith(f"{self.prefix}{start}")]

    def keep(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep these under this name, in place of what was there."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_tensors(self._path(name), tensors)
        except (OSError, SafetensorError) as error:
            if not about_files(error):
                raise
            raise GatelensError(
                f"cannot write to {self.folder} ({error}); the pieces before this one are whole: make room, or give "
                "another folder, and start the same command again."
            ) from error

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.prefix}{name}.safetensors"


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (FileNotFoundError, SafetensorError):  # not there, or damaged from outside: it is computed again
        return {}
