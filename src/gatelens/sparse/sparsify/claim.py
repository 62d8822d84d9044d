"""Whose folder it is: `settings.json` says what a run was asked for, and only the same may continue it."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.model import Model
from gatelens.runtime.checkpoints import Checkpoints
from gatelens.runtime.files import replace_file
from gatelens.runtime.versions import versions
from gatelens.sparse.sparsify.settings import SparsifySettings

FILE = "settings.json"


def claim(folder: Path, model: Model, settings: SparsifySettings, read: Tensor, start: Path | None) -> None:
    """Make the folder that of this run, or find that it is; refuse one that belongs to another."""
    path = folder / FILE
    mine: dict[str, Any] = {"model": model.fingerprint, "text": hashlib.sha256(read.numpy().tobytes()).hexdigest()}
    # From the folder, so that runs which were moved together still know each other.
    mine["start"] = None if start is None else os.path.relpath(start.resolve(), folder.resolve())
    if path.exists():
        theirs = _read(path)
        if "start" not in theirs:  # of an earlier version, which did not say: it is not known now either
            del mine["start"]
        changed = settings.changed(theirs["settings"]) + [name for name in mine if mine[name] != theirs[name]]
        if changed:
            more = "" if settings.cooldown else " (more steps are fine)"
            raise GatelensError(
                f"{folder} holds a run with another {' and '.join(changed)}: write to another folder, or ask for the "
                f"same to continue it{more}."
            )
        _refuse_steps(folder, settings, SparsifySettings(**theirs["settings"]).steps)
    elif (folder / "config.json").exists() or (folder / "log.csv").exists():
        raise GatelensError(f"{folder} holds something else already: write to another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(path, json.dumps({**mine, "settings": settings.as_dict(), "versions": versions()}, indent=1))


def _refuse_steps(folder: Path, settings: SparsifySettings, asked: int) -> None:
    done = max(Checkpoints(folder / "checkpoints").steps(), default=0)
    if settings.steps < done:
        raise GatelensError(
            f"{folder} holds a run of {done} steps, and {settings.steps} are asked for: ask for {done} or more, or "
            "write to another folder."
        )
    if settings.cooldown and settings.steps != asked:
        raise GatelensError(
            f"{folder} holds a run of {asked} steps with a cooldown, which would have been another with "
            f"{settings.steps}: ask for {asked}, or write to another folder (start='{folder}' begins with its weights)."
        )


def _read(path: Path) -> dict[str, Any]:
    """What an earlier call wrote, with settings that this version knows."""
    try:
        theirs = json.loads(path.read_text())
        unknown = sorted(theirs["settings"].keys() - SparsifySettings().as_dict().keys())
        if unknown:
            raise GatelensError(
                f"{path} is of another version of gatelens, with settings that this one does not know "
                f"({', '.join(unknown)}): use that version, or write to another folder."
            )
        SparsifySettings(**theirs["settings"])
        return {**theirs, "model": theirs["model"], "text": theirs["text"], "settings": {**theirs["settings"]}}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GatelensError(
            f"{path} is empty or damaged, and says no longer what run the folder holds: write to another folder (with "
            f"start='{path.parent}' it begins with the weights of the last checkpoint)."
        ) from error
