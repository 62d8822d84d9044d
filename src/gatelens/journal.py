"""Work in pieces: each finished piece is kept, so that a run that was killed continues where it was.

A method asks its journal for every piece by name. The journal computes it, or reads it from the folder where an
earlier run left it; numbers are stored as they are, so both ways end with the same results. Without a folder
nothing is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatelens.checkpoints import about_files
from gatelens.errors import GatelensError

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done, total) after each piece."""


class Journal:
    """The pieces of one run."""

    def __init__(self, folder: Path | None = None, progress: Progress | None = None, prefix: str = "") -> None:
        self.folder, self.progress, self.prefix = folder, progress, prefix
        self.what, self.done, self.total = "", 0, 0

    def part(self, name: str) -> Journal:
        """A journal for one part of the work, in the same folder."""
        return Journal(self.folder, self.progress, f"{self.prefix}{name}.")

    def begin(self, what: str, total: int) -> None:
        """Say what comes next and in how many pieces."""
        self.what, self.done, self.total = what, 0, total
        self._show()

    def piece(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """The piece of this name: from the folder if it is there, else computed and kept."""
        value = self._kept(name)
        if value is None:
            value = compute().detach().cpu().contiguous()
            self._keep(name, value)
        self.done += 1
        self._show()
        return value

    def _kept(self, name: str) -> Tensor | None:
        if self.folder is None or not (path := self._path(name)).exists():
            return None
        try:
            return load_file(path)["piece"]
        except (SafetensorError, KeyError):  # damaged from outside: it is computed again
            return None

    def _keep(self, name: str, value: Tensor) -> None:
        if self.folder is None:
            return
        path = self._path(name)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_file({"piece": value}, temporary)
            temporary.rename(path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            if not about_files(error):
                raise
            raise GatelensError(
                f"cannot write to {self.folder} ({error}); the pieces before this one are whole: make room, or give "
                "another folder, and start the same command again."
            ) from error

    def _path(self, name: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{self.prefix}{name}.safetensors"

    def _show(self) -> None:
        if self.progress is not None:
            self.progress(f"{self.prefix}{self.what}", self.done, self.total)
