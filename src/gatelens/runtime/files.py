"""Files that are there as a whole or not at all: a kill at any moment, or a full disk, leaves what was there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatelens.errors import GatelensError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden file to write to, which takes the place of ``path`` at the end, unless there was an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, newline="")


def write_json(path: Path, data: Any) -> None:
    replace_file(path, json.dumps(data, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise GatelensError(f"{path.parent} is no complete run of gatelens: it has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise GatelensError(f"{path} cannot be read ({error}): the folder is damaged; run it again.") from error
    if not isinstance(data, dict):
        raise GatelensError(f"{path} is not of gatelens: it should hold a JSON object.")
    return data


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """As safetensors, which everybody may read who may read the files beside them."""
    plain: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, tensor in tensors.items():
        plain[name] = tensor.detach().cpu().contiguous()
        place = plain[name].untyped_storage().data_ptr()
        if place in memory:  # safetensors refuses tensors that share memory: the ends of a curve are views of it
            plain[name] = plain[name].clone()
        memory.add(place)
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(plain, temporary)
        temporary.chmod(mode)  # safetensors writes for the owner alone


def read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise GatelensError(f"{path} cannot be read ({error}): the folder is damaged; run it again.") from error


def about_files(error: Exception) -> bool:
    """Whether an error, also one of safetensors or torch, is one of the system about a file."""
    words = ("os error", "PytorchStreamWriter", "inline_container")
    return isinstance(error, OSError) or any(word in str(error) for word in words)
