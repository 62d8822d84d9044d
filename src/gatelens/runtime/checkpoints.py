"""Checkpoints of a long run. Each is either complete or absent, and the last two are kept.

A checkpoint is written under a hidden name and then renamed, so that a process that is killed at any moment, or a full
disk, leaves the earlier checkpoints unchanged.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from gatelens.errors import GatelensError
from gatelens.runtime.files import is_about_files

KEPT = 2


class Checkpoints:
    """The checkpoint folders of a run, ``step-000040`` and so on, each written after that many steps.

    Where several processes train together, all of them call `write`, and only the main one renames and removes folders.

    Arguments:
        folder: holds the checkpoint folders.
        main: whether this is the main process.
        wait: returns when all processes have called it.
    """

    def __init__(self, folder: Path, main: bool = True, wait: Callable[[], None] = lambda: None) -> None:
        self.folder, self.main, self.wait = folder, main, wait

    def steps(self) -> list[int]:
        """The steps that have checkpoints, in ascending order."""
        matches = [re.fullmatch(r"step-(\d+)", path.name) for path in self.folder.glob("step-*")]
        return sorted(int(match[1]) for match in matches if match)

    def last(self) -> Path | None:
        """The folder of the newest checkpoint, or None if there is no checkpoint."""
        steps = self.steps()
        return self.path(steps[-1]) if steps else None

    def write(self, step: int, save: Callable[[Path], None]) -> None:
        """Let every process save its part into a new folder, then make that folder the newest checkpoint.

        Arguments:
            step: how many steps the run has made.
            save: writes the part of this process into the folder that it is given.
        """
        unfinished = self.folder / f".step-{step:06d}.part"
        try:
            if self.main:
                shutil.rmtree(unfinished, ignore_errors=True)  # left by a run that was killed
                unfinished.mkdir(parents=True)
            self.wait()
            save(unfinished)
            self.wait()
            if self.main:
                # Later checkpoints exist only if the run could not read them and resumed from an earlier one.
                for later in [other for other in self.steps() if other >= step]:
                    shutil.rmtree(self.path(later), ignore_errors=True)
                unfinished.rename(self.path(step))
                for old in self.steps()[:-KEPT]:
                    shutil.rmtree(self.path(old), ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError, GatelensError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if not is_about_files(error):
                raise
            last = self.last()
            state = f"The checkpoint {last} is complete" if last else "There is no earlier checkpoint"
            reason = getattr(error, "strerror", None) or error
            raise GatelensError(
                f"cannot write the checkpoint of step {step} to {self.folder} ({reason}). {state}: free some disk "
                "space and run the same command again to resume."
            ) from error

    def path(self, step: int) -> Path:
        """The folder of the checkpoint after this many steps."""
        return self.folder / f"step-{step:06d}"
