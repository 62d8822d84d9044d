"""Expand a section of a study file to cells: every task with every model and every combination of settings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_origin

from pydantic import BeforeValidator, ConfigDict, Field

from gatelens.errors import GatelensError
from gatelens.jobs.study._cells import Cell, cell_name
from gatelens.jobs.study._key_path import KeyPath
from gatelens.jobs.study.jobs import Job
from gatelens.jobs.study.models import ModelSpec
from gatelens.runtime.settings import Settings
from gatelens.tasks import TASKS

Names = Annotated[
    list[str], BeforeValidator(lambda value: [value] if isinstance(value, str) else value), Field(min_length=1)
]
"""One name, or a list of names."""

_FILE_OPTIONS = ("skip_bad",)  # the options of a task that is a .jsonl file


class Override(Settings):
    """Settings for one task or one model of a section. They are extra fields, because the job decides their names."""

    model_config = ConfigDict(extra="allow")


class TaskOverride(Override):
    """Settings for one task of a section, and the task's options."""

    options: dict[str, Any] = Field(default={})


class Section(Override):
    """A section of a study file: which tasks and models, and with what settings."""

    tasks: Names
    models: Names | None = None
    task: dict[str, TaskOverride] = Field(default={})
    model: dict[str, Override] = Field(default={})


def expand(
    section: Section,
    job: Job,
    place: KeyPath,
    models: Mapping[str, ModelSpec],
    instead: Mapping[str, Any] | None = None,
) -> Iterator[Cell]:
    """The cells of a section.

    Arguments:
        place: where the section is in the file.
        models: all models of the study by their labels.
        instead: settings that replace those of the file.
    """
    tasks, labels = section.tasks, list(models) if section.models is None else section.models
    _check_names(place / "tasks", tasks)
    sources = {task: _task_source(place / "tasks" / number, task, job) for number, task in enumerate(tasks)}
    _check_names(place / "models", labels, models)
    _check_overrides(place / "task", section.task, tasks)
    _check_overrides(place / "model", section.model, labels)
    for task, label in itertools.product(tasks, labels):
        task_part, model_part = section.task.get(task), section.model.get(label)
        options = task_part.options if task_part is not None else {}
        _check_options(place / "task" / task / "options", task, options)
        files = _option_files(place, options)
        # A model's settings take precedence over a task's, and both over the section's.
        parts = [(section, place), (task_part, place / "task" / task), (model_part, place / "model" / label)]
        axes: dict[str, list[Any]] = {}
        for part, part_place in parts:
            given = _settings(part, part_place, job)
            beside = {name: values[0] for name, values in axes.items()}
            beside |= {name: values[0] for name, value in given.items() if (values := _grid(name, value, job))}
            for name, value in given.items():
                axes[name] = _values(part_place / name, value, job, beside)
        axes |= {name: [value] for name, value in (instead or {}).items()}
        for settings, varied in _combinations(axes, place, job):
            name = cell_name(job.level(settings), task, label, varied)
            yield Cell(name, job.kind, models[label], task, sources[task], settings, options, varied, files)


def _settings(part: Override | None, place: KeyPath, job: Job) -> dict[str, Any]:
    """The settings that a part of the file gives, in the order of the file: values, or lists of values."""
    if part is None:
        return {}
    settings = dict(part.model_extra or {})
    preset = settings.pop("preset", None)
    if preset is not None and not (isinstance(preset, str) and preset in job.settings.presets):
        raise (place / "preset").unknown(f"preset of {job.kind}", preset, job.settings.presets)
    for name in settings:
        if name not in job.settings.model_fields:
            known = [*type(part).model_fields, *job.settings.model_fields]
            raise (place / name).unknown(f"setting of {job.kind}", name, known)
    return settings if preset is None else {**job.settings.presets[preset], **settings}


def _values(place: KeyPath, value: Any, job: Job, beside: Mapping[str, Any]) -> list[Any]:
    """The values of a setting, each of them checked: one, or those of a grid.

    Arguments:
        beside: other settings of the first cell, for values that need them.
    """
    values = _grid(str(place.keys[-1]), value, job)
    if not values:
        raise place.error("the list is empty: give at least one value.")
    return [place.check_setting(job.settings, single, beside) for single in values]


def _grid(name: str, value: Any, job: Job) -> list[Any]:
    """The values of a setting before they are checked. A list is a grid, except where the setting itself is a list."""
    is_tuple = get_origin(job.settings.model_fields[name].annotation) is tuple
    is_grid = isinstance(value, list) and (not is_tuple or (bool(value) and isinstance(value[0], list)))
    return value if is_grid else [value]


def _combinations(axes: Mapping[str, list[Any]], place: KeyPath, job: Job) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The settings for every combination of values, and those of the values that the name of the cell contains.

    A default value is not part of the name, and the level begins it anyway. So ``seed = 0`` can become ``seed = [0,
    1]`` without renaming a cell that is done.
    """
    defaults = job.settings(**job.defaults)
    in_name = [name for name in axes if len(axes[name]) > 1 and name != "level"]
    for combination in itertools.product(*axes.values()):
        chosen = {**job.defaults, **dict(zip(axes, combination, strict=True))}
        varied = {name: chosen[name] for name in in_name if chosen[name] != getattr(defaults, name)}
        yield place.check(job.settings, chosen), varied


def _check_names(place: KeyPath, names: Sequence[str], known: Mapping[str, Any] | None = None) -> None:
    for number, name in enumerate(names):
        if known is not None and name not in known:
            raise (place / number).unknown("model", name, known)
        if name in names[:number]:
            raise (place / number).error(f"{name} is in the list twice: remove one of them.")


def _check_overrides(place: KeyPath, overrides: Mapping[str, Override], names: Sequence[str]) -> None:
    for name in overrides:
        if name not in names:
            raise (place / name).unknown(f"{place.keys[-1]} in this section", name, names)


def _task_source(place: KeyPath, task: str, job: Job) -> str:
    """What to make a task from: its name, or the absolute path of a file."""
    if task in TASKS:
        if TASKS[task].kind not in job.task_kinds:
            raise place.error(
                f"the task {task} has target responses, not clean and corrupt prompts: put it into a section [gate]."
            )
        return task
    path = place.absolute(task)
    if path.is_file():
        return str(path)
    if path.suffix == ".jsonl":
        raise place.error(f"there is no file '{task}' ({path}): give a path relative to the study file.")
    raise place.unknown("task", task, TASKS)


def _check_options(place: KeyPath, task: str, options: Mapping[str, Any]) -> None:
    known = TASKS[task].options() if task in TASKS else _FILE_OPTIONS
    for name, value in options.items():
        if name not in known:
            raise (place / name).unknown(f"option of the task {task}", name, known)
        if task in TASKS:
            try:
                TASKS[task].check(task, {name: value})
            except GatelensError as error:
                raise (place / name).error(str(error)) from error


def _option_files(place: KeyPath, options: Mapping[str, Any]) -> dict[str, str]:
    """The option ``source``, if it is a file and not a data set of the hub, with its absolute path."""
    source = options.get("source")
    if not isinstance(source, str) or not (path := place.absolute(source)).is_file():
        return {}
    return {"source": str(path)}
