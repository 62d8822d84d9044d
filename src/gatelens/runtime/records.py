"""What a finished run saves as JSON: checked when it is read, with a schema version."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from pydantic import ConfigDict, Field, ValidationError

from gatelens.errors import GatelensError
from gatelens.runtime.files import read_json, write_csv
from gatelens.runtime.settings import Settings, explain

SCHEMA_VERSION = 2
"""The version of the files that this code writes. Files of gatelens 0.1 have no version and count as 1."""


class Record(Settings):
    """The schema of a JSON file in a run folder. Unknown keys are ignored, so that a later version can add some."""

    model_config = ConfigDict(extra="ignore")

    schema_version: int = Field(default=1, ge=1, le=SCHEMA_VERSION)


R = TypeVar("R", bound=Record)


def read_record(path: Path, cls: type[R]) -> R:
    """Read and check the record in a JSON file. An error names the file, the key and what is wrong."""
    data = read_json(path)
    if isinstance(version := data.get("schema_version", 1), int) and version > SCHEMA_VERSION:
        raise GatelensError(
            f"{path} was written by a newer version of gatelens (schema {version}; this one reads up to "
            f"{SCHEMA_VERSION}): upgrade gatelens."
        )
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise GatelensError(f"{explain(error, cls, f'{path}: ')} The file is damaged: run the job again.") from None
    except GatelensError as error:  # raised by a check of several fields
        raise GatelensError(f"{path}: {error} The file is damaged: run the job again.") from None


def write_lines(path: Path, cls: type[Settings], lines: Iterable[Settings]) -> None:
    """Write instances of a class as a CSV table, with a column for each of its fields."""
    columns = list(cls.model_fields)
    write_csv(path, columns, ([getattr(line, name) for name in columns] for line in lines))
