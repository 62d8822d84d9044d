"""The folder of a sparsify run. `settings.json` says what the run was asked for; only the same request resumes it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.runtime.files import replace_file
from gatelens.runtime.processes import Processes
from gatelens.runtime.run_folder import RESULT, RunFolder
from gatelens.runtime.versions import versions
from gatelens.sparse.mixture import TrainingText
from gatelens.sparse.sparsify.settings import SparsifySettings

FILE = "settings.json"


class SparsifyFolder(RunFolder):
    """The folder of one run, locked by the process that trains in it.

    A run may be resumed with more steps, so its request is not compared as a whole, as that of other jobs is.

    Arguments:
        out: the folder, or None: then nothing is kept.
        texts: everything that is trained on.
        start: the folder of the run whose weights this one begins with.
    """

    def __init__(
        self,
        out: Path | None,
        model: Model,
        settings: SparsifySettings,
        texts: Sequence[TrainingText],
        start: Path | None,
        processes: Processes | None = None,
    ) -> None:
        fingerprints = "".join(text.fingerprint() for text in texts)
        asked: dict[str, Any] = {
            "model": model.fingerprint,
            "text": hashlib.sha256(fingerprints.encode()).hexdigest(),
        }
        # A relative path, so that runs that are moved together still refer to each other.
        asked["start"] = None if start is None or out is None else os.path.relpath(start.resolve(), out.resolve())
        super().__init__(out, asked, processes=processes)
        self.settings = settings

    def _refuse_another(self, path: Path) -> None:
        # Looked for first: another process may write its request, and then these files, now.
        has_other_files = (path / "config.json").exists() or (path / "log.csv").exists()
        if (path / FILE).exists():
            saved = _read(path / FILE)
            self._refuse_another_run(path, saved, self._comparable(saved))
        elif has_other_files:
            raise GatelensError(f"{path} holds other files already: give another folder.")

    def _is_finished(self, path: Path) -> bool:
        return False  # a finished run may go on for more steps

    def _write_request(self, path: Path) -> None:
        (path / RESULT).unlink(missing_ok=True)  # the result of fewer steps
        saved = _read(path / FILE) if (path / FILE).exists() else self.asked
        record = {**self._comparable(saved), "settings": self.settings.as_dict(), "versions": versions()}
        replace_file(path / FILE, json.dumps(record, indent=1))

    def _comparable(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        """The request without what an earlier version did not record."""
        return {name: value for name, value in self.asked.items() if name != "start" or "start" in saved}

    def _refuse_another_run(self, path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        settings = self.settings
        changed = settings.changed(saved["settings"]) + [name for name in asked if asked[name] != saved[name]]
        if changed:
            more = "" if settings.depends_on_steps else " (more steps are allowed)"
            raise GatelensError(
                f"{path} holds a run with another {' and '.join(changed)}: give another folder, or ask for the same to "
                f"resume it{more}."
            )
        done = max(Checkpoints(path / "checkpoints").steps(), default=0)
        if settings.steps < done:
            raise GatelensError(
                f"{path} holds a run of {done} steps, and {settings.steps} are asked for: ask for {done} or more, or "
                "give another folder."
            )
        before = SparsifySettings(**saved["settings"]).steps
        if settings.depends_on_steps and settings.steps != before:
            raise GatelensError(
                f"{path} holds a run of {before} steps, and its schedule depends on the number of steps: ask for "
                f"{before} steps, or give another folder (start='{path}' begins with its weights)."
            )


def _read(path: Path) -> dict[str, Any]:
    """The request that an earlier process wrote."""
    try:
        saved = json.loads(path.read_text())
        unknown = sorted(saved["settings"].keys() - SparsifySettings.model_fields.keys())
        if unknown:
            raise GatelensError(
                f"{path} was written by another version of gatelens, with settings that this version does not have "
                f"({', '.join(unknown)}): use that version, or give another folder."
            )
        _, _, saved_settings = saved["model"], saved["text"], saved["settings"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path) from error
    try:
        SparsifySettings(**saved_settings)
    except GatelensError as error:
        raise _damaged(path) from error
    return dict(saved)


def _damaged(path: Path) -> GatelensError:
    return GatelensError(
        f"{path} is empty or damaged, so that it is not known which run the folder holds: give another folder (with "
        f"start='{path.parent}' the new run begins with the weights of the last checkpoint)."
    )
