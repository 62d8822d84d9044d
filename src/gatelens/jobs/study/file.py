"""Read a study: a TOML file that names models, and for each job its tasks and settings.

    title = "Heads kept"

    [models]
    smollm2 = "smollm2"
    sparse = { load = "runs/sparse", dense = "smollm2" }

    [circuit]                       # fields of CircuitSettings; a list is a grid
    tasks = ["ioi", "docstring"]
    level = ["heads", "edges"]

    [circuit.task.docstring]        # other settings for one task, and the task's options; [circuit.model.sparse] alike
    n = 16
    options = { corruption = "answer" }

    [gate]                          # fields of RolesSettings
    tasks = ["syntax"]

``[[circuit]]`` may stand several times. Paths are relative to the file. Every mistake is pointed at by its line.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from gatelens.errors import GatelensError
from gatelens.jobs.study.cells import DTYPES, Cell, Kind, ModelSpec, cell_name
from gatelens.jobs.study.lines import Keys, Toml
from gatelens.loading import BUILT_IN
from gatelens.measures.circuit_result import CircuitSettings
from gatelens.measures.roles_result import RolesSettings
from gatelens.runtime.settings import setting_fields
from gatelens.tasks import TASKS

JOBS: dict[Kind, type[CircuitSettings] | type[RolesSettings]] = {"circuit": CircuitSettings, "gate": RolesSettings}
_SECTION = ("tasks", "models", "task", "model")  # what a section holds besides settings
_WORDS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Study:
    """Cells to run, those of one model in a row."""

    title: str
    path: Path
    models: dict[str, ModelSpec]
    cells: list[Cell]


def read_study(path: str | Path) -> Study:
    """The study of a file. Nothing is loaded, and no model is looked for beyond this machine's folders."""
    toml = Toml(Path(path))
    data = toml.data
    for key in data:
        if key not in ("title", "models", *JOBS):
            raise toml.unknown("key", key, ("title", "models", *JOBS), key)
    title = data.get("title", toml.path.stem)
    if not isinstance(title, str):
        raise toml.mistake("the title is a text.", "title")
    models = _models(toml)
    cells: dict[str, tuple[Cell, Keys]] = {}
    for kind in JOBS:
        for section, keys in _sections(toml, kind):
            for cell in _cells(toml, kind, section, keys, models):
                if cell.name in cells:
                    raise toml.mistake(
                        f"the cell {cell.name} is asked for a second time (first on line "
                        f"{toml.line(*cells[cell.name][1])}): for several values of a setting write a list.",
                        *keys,
                    )
                cells[cell.name] = cell, keys
    if not cells:
        raise toml.mistake("nothing to run: a study has a section [circuit] or [gate] with tasks.")
    order = list(models)
    in_order = sorted((cell for cell, _ in cells.values()), key=lambda cell: order.index(cell.model.label))
    return Study(title, toml.path, models, in_order)


def _models(toml: Toml) -> dict[str, ModelSpec]:
    given = toml.data.get("models")
    if not isinstance(given, dict) or not given:
        raise toml.mistake('a study names its models in a section [models], e.g. smollm2 = "smollm2".', "models")
    models: dict[str, ModelSpec] = {}
    for label, value in given.items():
        keys: Keys = ("models", label)
        about: Any = {"load": value} if isinstance(value, str) else value
        if not isinstance(about, dict) or not isinstance(about.get("load"), str):
            raise toml.mistake(
                f"{label} is what to load (a text), or a table with `load` and other options; a label with a dot in it "
                "stands in quotes.",
                *keys,
            )
        at = keys if about is not value else (*keys, "load")
        hints = get_type_hints(ModelSpec)
        known = [field.name for field in setting_fields(ModelSpec) if field.name not in ("label", "where")]
        for key in about:
            if key not in known:
                raise toml.unknown("model option", key, known, *keys, key)
            about = {**about, key: _typed(toml, key, about[key], hints[key], (*keys, key))}
        if about.get("dtype", DTYPES[0]) not in DTYPES:
            raise toml.unknown("dtype", about["dtype"], DTYPES, *keys, "dtype")
        gpus = about.get("gpus") or 0
        if about.get("cpus", 1) <= 0 or gpus < 0 or (gpus > 1 and gpus % 1):
            raise toml.mistake("cpus is above 0, gpus 0 or more, and a whole number above 1.", *keys)
        models[label] = ModelSpec(label, _model_at(toml, about["load"], at), **about)
    for label, spec in models.items():
        if spec.dense is not None and (spec.dense not in models or spec.dense == label):
            others = [other for other in models if other != label]
            raise toml.unknown("dense model", spec.dense, others, "models", label, "dense")
    return models


def _model_at(toml: Toml, what: str, keys: Keys) -> str:
    """What to give to `gatelens.load`; a path is relative to the file."""
    if what in BUILT_IN:
        return what
    path = _path(toml, what)
    if what and path.exists():
        return str(path)
    if not what or what.startswith((".", "~", "/")) or what.count("/") > 1 or what.endswith((".gguf", ".bin")):
        raise toml.mistake(
            f"no folder or file '{what}' ({path}): give a path that exists, relative to the file.", *keys
        )
    if "/" not in what and (close := difflib.get_close_matches(what, BUILT_IN, 1, cutoff=0.7)):
        raise toml.mistake(
            f"no model '{what}': did you mean '{close[0]}'? There are the built-in names {', '.join(BUILT_IN)}, "
            "folders and hub ids.",
            *keys,
        )
    return what


def _path(toml: Toml, what: str) -> Path:
    """A path of the study, which is relative to its file, made whole."""
    return (toml.path.parent / os.path.expanduser(what)).resolve()  # Path's own raises where there is no such user


def _sections(toml: Toml, kind: Kind) -> Iterator[tuple[dict[str, Any], Keys]]:
    given = toml.data.get(kind, [])
    if isinstance(given, dict):
        yield given, (kind,)
        return
    if not isinstance(given, list) or not all(isinstance(section, dict) for section in given):
        raise toml.mistake(f"{kind} is a section: write [{kind}], or [[{kind}]] for each of several.", kind)
    for number, section in enumerate(given):
        yield section, (kind, number)


def _cells(
    toml: Toml, kind: Kind, section: Mapping[str, Any], keys: Keys, models: Mapping[str, ModelSpec]
) -> Iterator[Cell]:
    known = [field.name for field in setting_fields(JOBS[kind])]
    for key in section:
        if key not in (*_SECTION, *known):
            raise toml.unknown(f"setting of {kind}", key, (*_SECTION, *known), *keys, key)
        if key in ("task", "model") and not isinstance(section[key], dict):
            raise toml.mistake(f"[{kind}.{key}.NAME] is a section of its own; names stand in `{key}s`.", *keys, key)
    tasks = _names(toml, section, "tasks", keys, None)
    labels = _names(toml, section, "models", keys, models)
    places = {task: _task_at(toml, kind, task, (*keys, "tasks", number)) for number, task in enumerate(tasks)}
    for key, names in (("task", tasks), ("model", labels)):
        _check_overrides(toml, kind, section.get(key, {}), names, (*keys, key))
    for task, label in itertools.product(tasks, labels):
        # Later ones take precedence; each value is kept with its place in the file.
        given: dict[str, tuple[Any, Keys]] = {}
        for part in ((), ("task", task), ("model", label)):
            values = section
            for key in part:
                values = values.get(key, {})
            given |= {k: (v, (*keys, *part, k)) for k, v in values.items() if k in (*known, "options")}
        options, at = given.pop("options", ({}, keys))
        _check_options(toml, task, options, at)
        source = options.get("source")
        is_file = isinstance(source, str) and _path(toml, source).is_file()  # not a set of the hub
        files = {"source": str(_path(toml, source))} if is_file else {}
        for settings, varied in _grid(toml, kind, given, keys):
            level = settings.level if isinstance(settings, CircuitSettings) else "roles"
            name = cell_name(level, task, label, varied)
            yield Cell(name, kind, models[label], task, places[task], settings, options, varied, files)


def _names(
    toml: Toml, section: Mapping[str, Any], key: str, keys: Keys, known: Mapping[str, ModelSpec] | None
) -> list[str]:
    """A list of names: the tasks, or labels of models (all, unless said)."""
    if key not in section and known is not None:
        return list(known)
    given = section.get(key)
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise toml.mistake(f"the section [{keys[0]}] needs {key}: a list of names.", *keys, key)
    for number, name in enumerate(names):
        if known is not None and name not in known:
            raise toml.unknown("model", name, known, *keys, key, number)
        if name in names[:number]:
            raise toml.mistake(f"{name} stands twice in {key}.", *keys, key, number)
    return names


def _task_at(toml: Toml, kind: Kind, task: str, keys: Keys) -> str:
    if task in TASKS:
        if kind == "circuit" and TASKS[task].kind != "circuit":
            raise toml.mistake(
                f"the task {task} has target responses, not clean and corrupt prompts: it belongs in [gate].", *keys
            )
        return task
    path = _path(toml, task)
    if path.is_file():
        return str(path)
    if path.suffix == ".jsonl":
        raise toml.mistake(f"no file '{task}' ({path}): give a path that exists, relative to the study.", *keys)
    raise toml.unknown("task", task, TASKS, *keys)


def _check_overrides(toml: Toml, kind: Kind, given: dict[str, Any], names: list[str], keys: Keys) -> None:
    known = ["options"] * (keys[-1] == "task") + [field.name for field in setting_fields(JOBS[kind])]
    for name, values in given.items():
        if name not in names:
            raise toml.unknown(f"{keys[-1]} of this section", name, names, *keys, name)
        if not isinstance(values, dict):
            raise toml.mistake(f"[{kind}.{keys[-1]}.{name}] is a section of settings.", *keys, name)
        for key in values:
            if key not in known:
                raise toml.unknown(f"setting of {kind}", key, known, *keys, name, key)


def _check_options(toml: Toml, task: str, options: Any, keys: Keys) -> None:
    if not isinstance(options, dict):
        raise toml.mistake("options is a table, e.g. { corruption = 'exchange' }.", *keys)
    known = TASKS[task].options() if task in TASKS else ("skip_bad",)
    for key in options:
        if key not in known:
            raise toml.unknown(f"option of the task {task}", key, known, *keys, key)


def _grid(
    toml: Toml, kind: Kind, given: Mapping[str, tuple[Any, Keys]], keys: Keys
) -> Iterator[tuple[CircuitSettings | RolesSettings, dict[str, Any]]]:
    """Settings for every combination of the values that are lists, and those of the values that the name tells.

    A value that is the default is not part of the name, nor is the level, which begins it: so ``seed = 0`` can grow to
    ``seed = [0, 1]`` without renaming a cell that is done.
    """
    cls = JOBS[kind]
    hints = {field.name: field.annotation for field in setting_fields(cls)}
    axes: dict[str, list[Any]] = {}
    for key, (value, at) in given.items():
        pair = get_origin(hints[key]) is tuple and not (
            isinstance(value, list) and value and isinstance(value[0], list)
        )
        values = value if isinstance(value, list) and not pair else [value]
        if not values:
            raise toml.mistake(f"{key} is an empty list: give at least one value.", *at)
        axes[key] = [_typed(toml, key, one, hints[key], at) for one in values]
        for one in axes[key]:
            _make(toml, cls, {key: one}, at)
    defaults = cls()
    for combination in itertools.product(*axes.values()):
        chosen = dict(zip(axes, combination, strict=True))
        lists = [key for key in chosen if len(axes[key]) > 1 and key != "level"]
        yield (
            _make(toml, cls, chosen, keys),
            {key: chosen[key] for key in lists if chosen[key] != getattr(defaults, key)},
        )


def _make(
    toml: Toml, cls: type[CircuitSettings] | type[RolesSettings], given: dict[str, Any], keys: Keys
) -> CircuitSettings | RolesSettings:
    try:
        return cls(**given)
    except GatelensError as error:
        raise toml.mistake(str(error), *keys) from error


def _typed(toml: Toml, key: str, value: Any, hint: Any, keys: Keys) -> Any:
    """The value as its field takes it: whole numbers pass for numbers, lists for tuples."""
    if get_origin(hint) is tuple:
        wanted = get_args(hint)
        if not isinstance(value, list) or (Ellipsis not in wanted and len(value) != len(wanted)):
            raise toml.mistake(f"{key} is a list of {len(wanted)} values, not {value!r}.", *keys)
        return tuple(_typed(toml, key, one, wanted[0], keys) for one in value)
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise toml.unknown(key, value, get_args(hint), *keys)
        return value
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    for kind in kinds:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
            return value
    raise toml.mistake(f"{key} is {_WORDS[kinds[0]]}, not {value!r}.", *keys)
