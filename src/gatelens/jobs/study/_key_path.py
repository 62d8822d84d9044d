"""A place in a study file. Every error about the file names it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from gatelens.errors import GatelensError, shortened
from gatelens.runtime.inputs import usable_path
from gatelens.runtime.settings import Settings, explain, unknown_name

S = TypeVar("S", bound=Settings)


@dataclass(frozen=True)
class KeyPath:
    """The path to a value in a TOML file: names of keys, and numbers for the elements of lists.

    Example:
        >>> str(KeyPath(Path("x.toml")) / "circuit" / "task" / "ioi" / "n")
        'x.toml: circuit.task.ioi.n'
    """

    file: Path
    keys: tuple[str | int, ...] = ()

    def __truediv__(self, key: str | int) -> KeyPath:
        return KeyPath(self.file, (*self.keys, key))

    def __str__(self) -> str:
        return f"{self.file}: {shortened(self.path)}" if self.keys else str(self.file)

    @property
    def path(self) -> str:
        """The keys, joined by dots."""
        return ".".join(map(str, self.keys))

    def absolute(self, path: str) -> Path:
        """The absolute form of a path that is relative to the file."""
        try:
            # Path.expanduser fails for an unknown user.
            return usable_path(self.file.parent / os.path.expanduser(path)).resolve()
        except GatelensError as error:
            raise self.error(str(error)) from None

    def error(self, message: str) -> GatelensError:
        """The error to raise about the value at this place."""
        return GatelensError(f"{self}: {message}")

    def unknown(self, kind: str, name: object, known: Iterable[str]) -> GatelensError:
        """The error about a name that does not exist, with the nearest one that does."""
        return self.error(unknown_name(kind, name, known))

    def check(self, cls: type[S], values: Mapping[str, Any]) -> S:
        """The table at this place as settings. An error names the key that is wrong."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise GatelensError(explain(error, cls, f"{self}." if self.keys else f"{self}: ")) from None
        except GatelensError as error:  # raised by a check of several fields
            raise self.error(str(error)) from None

    def check_setting(self, cls: type[Settings], value: Any, beside: Mapping[str, Any]) -> Any:
        """The value at this place as the field of these settings that has the name of the last key.

        Arguments:
            beside: other settings, which some values need: a selection of edges needs the level edges.
        """
        *keys, name = self.keys
        try:
            settings = cls.model_validate({str(name): value})
        except ValidationError as error:
            raise GatelensError(explain(error, cls, f"{KeyPath(self.file, tuple(keys))}.")) from None
        except GatelensError as error:
            try:
                settings = cls.model_validate({**beside, str(name): value})
            except (GatelensError, ValidationError):
                raise self.error(str(error)) from None
        return getattr(settings, str(name))
