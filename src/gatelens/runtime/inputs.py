"""What users give to every part of gatelens: JSON text and paths. This module does not import torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError, shortened


def parse_json(text: str) -> Any:
    """Parse JSON. Whatever is wrong with the text raises a `ValueError`, nesting that is too deep as well."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def usable_path(path: str | os.PathLike[str]) -> Path:
    """The path, whether it exists or not, if the operating system accepts such a name at all."""
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except (OSError, ValueError) as error:  # too long, a null byte, a character that is not text
        reason = error.strerror if isinstance(error, OSError) else error
        raise GatelensError(
            f"{shortened(ascii(os.fspath(path)))} cannot be the name of a file or folder ({reason}): give another one."
        ) from error
    return Path(path)
