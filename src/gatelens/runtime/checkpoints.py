"""Checkpoints of a long run: whole or not there at all, the last two kept.

A checkpoint is written under a hidden name and then renamed, so that a process killed at any moment, or a full disk,
leaves the earlier ones as they were.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from gatelens.errors import GatelensError
from gatelens.runtime.files import about_files

KEPT = 2


class Checkpoints:
    """Folders `step-000040` and so on, each written after that many steps.

    Where several processes train together, all call `write`, and only the main one renames and removes.
    """

    def __init__(self, folder: Path, main: bool = True, wait: Callable[[], None] = lambda: None) -> None:
        self.folder, self.main, self.wait = folder, main, wait

    def steps(self) -> list[int]:
        """The steps of which there are checkpoints, in order."""
        names = [path.name for path in self.folder.glob("step-*")]
        return sorted(int(found[1]) for name in names if (found := re.fullmatch(r"step-(\d+)", name)))

    def last(self) -> Path | None:
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        """Let every process save its part into a new folder, then make it the last checkpoint."""
        part = self.folder / f".step-{step:06d}.part"
        try:
            if self.main:
                shutil.rmtree(part, ignore_errors=True)  # of a run that was killed
                part.mkdir(parents=True)
            self.wait()
            save(part)
            self.wait()
            if self.main:
                for later in [other for other in self.steps() if other >= step]:  # which could not be read
                    shutil.rmtree(self.path(later), ignore_errors=True)
                part.rename(self.path(step))
                for old in self.steps()[:-KEPT]:
                    shutil.rmtree(self.path(old), ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError, GatelensError) as error:
            shutil.rmtree(part, ignore_errors=True)
            if not about_files(error):
                raise
            last = self.last()
            kept = f"{last} is whole" if last else "there was none before"
            raise GatelensError(
                f"cannot write the checkpoint of step {step} in {self.folder} ({error}); {kept}: "
                "make room and start the same command again, it continues from there."
            ) from error

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"
