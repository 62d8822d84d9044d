"""Read a study file: TOML that names models and, for each job, its tasks and settings.

    title = "Heads kept"

    [models]
    smollm2 = "smollm2"
    sparse = { load = "runs/sparse", dense = "smollm2" }

    [circuit]                       # fields of CircuitSettings; a list makes a grid
    tasks = ["ioi", "docstring"]
    level = ["heads", "edges"]

    [circuit.task.docstring]        # other settings for one task, and its options; [circuit.model.sparse] likewise
    n = 16
    options = { corruption = "answer" }

    [gate]                          # fields of RolesSettings
    tasks = ["syntax"]

A section can occur several times, as ``[[circuit]]``. Paths are relative to the file. There are three steps: the TOML
is parsed, its tables are checked (`StudyFile`, `ModelOptions`, `Section`), and the sections are expanded to cells
(`_grid`). Every error names the file and the path to the key.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from gatelens.errors import GatelensError, shortened
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._grid import Section, expand
from gatelens.jobs.study._key_path import KeyPath
from gatelens.jobs.study.jobs import JOBS
from gatelens.jobs.study.models import ModelOptions, ModelSpec
from gatelens.loading import BUILT_IN
from gatelens.runtime.inputs import usable_path
from gatelens.runtime.settings import Settings


@dataclass(frozen=True)
class Study:
    """The cells to run. Cells of one model follow each other.

    Arguments:
        path: the study file.
        models: the models by their labels.

    Example:
        study = gatelens.read_study("study.toml")
        study.title, list(study.models), [cell.name for cell in study.cells]
    """

    title: str  # the title of the study
    path: Path
    models: dict[str, ModelSpec]
    cells: list[Cell]  # what to run: one model, task and setting each


def read_study(path: str | Path, quick: bool = False) -> Study:
    """Read and check a study file. No model is loaded, and only folders of this machine are looked at.

    Example:
        study = read_study("examples/heads-kept.toml")
        print([cell.name for cell in study.cells])

    Arguments:
        path: the study file, in TOML.
        quick: give every cell the sizes of its job's preset ``quick``, whatever the file says.
    """
    root = KeyPath(Path(path))
    file = root.check(_study_class(), read_toml(root.file))
    models = _models(root / "models", file.models)
    cells: dict[str, Cell] = {}
    places: dict[str, KeyPath] = {}
    for job in JOBS.values():
        for section, place in _sections(root / job.kind, getattr(file, job.kind)):
            for cell in expand(section, job, place, models, job.settings.presets["quick"] if quick else {}):
                if cell.name in cells:
                    raise place.error(
                        f"the cell {cell.name} is already in {places[cell.name].path}. For several values of a setting "
                        "write a list."
                    )
                cells[cell.name], places[cell.name] = cell, place
    if not cells:
        names = " or ".join(f"[{kind}]" for kind in JOBS)
        raise root.error(f"there is nothing to run: a study needs a section {names} with tasks.")
    labels = list(models)
    in_order = sorted(cells.values(), key=lambda cell: labels.index(cell.model.label))
    title = f"{file.title or root.file.stem}{', quick' * quick}"
    return Study(title, root.file, models, in_order)


def read_toml(path: Path) -> dict[str, Any]:
    """The contents of a TOML file. A syntax error has the parser's line and column."""
    try:
        return tomllib.loads(usable_path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise GatelensError(f"cannot read the study {path}: {reason}. Give the path of a TOML file.") from error
    except RecursionError as error:
        raise GatelensError(f"{path} is not a study: it is nested too deeply.") from error
    except ValueError as error:  # the parser's own error, or a number with thousands of digits
        raise GatelensError(f"{path} is not valid TOML: {shortened(str(error))}.") from error


def _as_table(value: Any) -> Any:
    return {"load": value} if isinstance(value, str) else value


class StudyFile(Settings):
    """The top level of a study file, besides its sections."""

    title: str | None = None
    models: dict[str, Annotated[ModelOptions, BeforeValidator(_as_table)]] = Field(min_length=1)


@cache
def _study_class() -> type[StudyFile]:
    """The schema of a study file, with a key for each job. Its sections are checked one by one."""
    sections: dict[str, Any] = {kind: (Any, []) for kind in JOBS}
    return create_model("StudyFile", __base__=StudyFile, **sections)


def _sections(place: KeyPath, tables: Any) -> Iterator[tuple[Section, KeyPath]]:
    """The sections of a job: one table ``[circuit]``, or several ``[[circuit]]``."""
    if isinstance(tables, dict):
        yield place.check(Section, tables), place
        return
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise place.error(f"it must be a section: write [{place.path}], or [[{place.path}]] for each of several.")
    for number, table in enumerate(tables):
        yield (place / number).check(Section, table), place / number


def _models(place: KeyPath, tables: dict[str, ModelOptions]) -> dict[str, ModelSpec]:
    """The models by their labels, with absolute paths."""
    models: dict[str, ModelSpec] = {}
    for label, options in tables.items():
        others = [other for other in tables if other != label]
        if options.dense is not None and options.dense not in others:
            raise (place / label / "dense").unknown("other model", options.dense, others)
        models[label] = ModelSpec(**dict(options), label=label, where=_locate(place / label, options.load))
    return models


def _locate(place: KeyPath, source: str) -> str:
    """What to give to `gatelens.load` for a model. A path is relative to the file."""
    if source in BUILT_IN:
        return source
    path = place.absolute(source)
    if source and path.exists():
        return str(path)
    looks_like_path = source.startswith((".", "~", "/")) or source.count("/") > 1 or source.endswith((".gguf", ".bin"))
    if not source or looks_like_path:
        raise place.error(f"there is no folder or file '{source}' ({path}): give a path relative to the study file.")
    if "/" not in source and (close := difflib.get_close_matches(source, BUILT_IN, 1, cutoff=0.7)):
        raise place.error(
            f"no model '{source}': did you mean '{close[0]}'? A model is a built-in name ({', '.join(BUILT_IN)}), a "
            "folder or a hub id."
        )
    return source
