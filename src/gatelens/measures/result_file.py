"""The schema of ``result.json``, the summary of a finished run.

Version 0.1 wrote no ``schema_version``; such a file counts as schema 1 and is converted when it is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field

from gatelens.errors import GatelensError
from gatelens.runtime.files import read_json
from gatelens.runtime.run_folder import RESULT
from gatelens.runtime.settings import Settings

SCHEMA_VERSION: Literal[2] = 2


class ResultFile(Settings):
    """What every ``result.json`` holds."""

    model_config = ConfigDict(allow_inf_nan=True)  # a loss or a log-probability may overflow

    schema_version: Literal[2] = SCHEMA_VERSION
    model: str = Field(description="the name of the model")
    seconds: float = Field(ge=0, description="how long the run took, including starts that were killed")

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The summary of a finished run. A file of an earlier schema is converted.

        Arguments:
            folder: the run folder.
        """
        values: Mapping[str, Any] = read_json(folder / RESULT)
        version = values.get("schema_version", 1)
        if version not in (1, SCHEMA_VERSION):
            raise GatelensError(
                f"{folder / RESULT} has schema version {version!r}, but this version of gatelens reads up to "
                f"{SCHEMA_VERSION}: update gatelens, or run the job again."
            )
        try:
            return cls(**(cls.from_first_schema(values) if version == 1 else values))
        except (GatelensError, TypeError, AttributeError) as error:
            reason = str(error).rstrip(".")
            raise GatelensError(f"cannot read {folder / RESULT} ({reason}): run the job again.") from error

    @classmethod
    def from_first_schema(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """The values of a file that version 0.1 wrote, under the names of this schema."""
        return {key: values[key] for key in cls.model_fields if key in values}

    def to_json(self) -> dict[str, Any]:
        """What is written to ``result.json``."""
        return self.model_dump(mode="json")
