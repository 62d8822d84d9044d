"""The cells of a study. A cell is one run: one job on one model and one task with one group of settings."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gatelens.jobs.study.jobs import JOBS, Job
from gatelens.jobs.study.models import ModelSpec, source_fingerprint
from gatelens.runtime.versions import versions

_LONGEST_NAME = 150  # file systems allow 255 bytes, and a name gets suffixes


@dataclass(frozen=True)
class Cell:
    """One run of a study.

    Arguments:
        name: also the name of its folder.
        kind: which job it is, a name of `JOBS`.
        task: the task as the study names it.
        where: what the task is made from: its name, or the absolute path of a file.
        settings: the settings of the job.
        options: the options of the task.
        varied: the settings that differ between the cells of a grid, besides the level.
        files: those options that are files, with their absolute paths.
    """

    name: str
    kind: str
    model: ModelSpec
    task: str
    where: str
    settings: Any
    options: dict[str, Any] = field(default_factory=dict)
    varied: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    @property
    def job(self) -> Job:
        """What is run."""
        return JOBS[self.kind]

    @property
    def level(self) -> str:
        """What the gates act on; ``roles`` if gates are learned."""
        return self.job.level(self.settings)

    @property
    def task_options(self) -> dict[str, Any]:
        """The options of the task, with absolute paths."""
        return {**self.options, **self.files}

    def identity(self) -> dict[str, Any]:
        """What was asked, as plain JSON, without what changes no number, such as the memory budget."""
        asked = {
            "kind": self.kind,
            "model": self.model.identity(),
            "task": self.task,
            "options": self.options,
            "settings": self.settings.identity(),
        }
        plain: dict[str, Any] = json.loads(json.dumps(asked, default=str))
        return plain

    def fingerprint(self) -> str:
        """A hash of what was asked, of the model's files and of the versions of the code. No model is loaded."""
        hashed = {**self.identity(), "source": source_fingerprint(self.model.where), "versions": versions()}
        if (file := Path(self.where)).is_file():
            hashed["lines"] = hashlib.sha256(file.read_bytes()).hexdigest()
        if self.files:
            hashed["files"] = {k: hashlib.sha256(Path(v).read_bytes()).hexdigest() for k, v in self.files.items()}
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()

    def half_memory(self) -> Cell:
        """The same cell with half the memory budget, so that its batches are half as large."""
        return replace(self, settings=self.settings.replace(memory_gb=self.settings.memory_gb / 2))


def cell_name(level: str, task: str, label: str, varied: Mapping[str, Any]) -> str:
    """A readable name for a folder, such as ``heads-ioi-smollm2-seed-1``."""
    task = Path(task).stem if task.endswith(".jsonl") else task
    settings = [f"{key}-{value}" for key, value in varied.items()]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join([level, task, label, *settings])).strip("-.")
    if len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"
