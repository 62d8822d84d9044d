"""Files that are either complete or absent: a kill at any moment, or a full disk, leaves the earlier file in place."""

from __future__ import annotations

import csv
import ctypes
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.inputs import parse_json, usable_path

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


class WriteError(GatelensError, OSError):
    """A file or folder cannot be written: the disk is full, or read-only, or belongs to somebody else.

    ``strerror`` is the reason that the operating system gives.
    """


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an error of the operating system about a file into a `WriteError` about this path, in one sentence."""
    try:
        yield
    except WriteError:
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        if not is_about_files(error):
            raise
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        if isinstance(error, FileNotFoundError):
            remedy = "The folder does not exist, or was removed in the meantime: run the same command again to start "
            remedy += "from the beginning"
        else:
            remedy = "Everything that was written before is complete: free some disk space and run the same command "
            remedy += "again to resume"
        explained = WriteError(f"cannot write to {path} ({reason}). {remedy}, or give another folder.")
        explained.strerror = reason
        raise explained from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A hidden temporary file to write to. It replaces ``path`` at the end, unless there was an error.

    Every file of gatelens is written through this function, or into a folder of `write_folder`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with writing(path):
            yield temporary
            temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Create a folder and its parents. Raise an error if a file has this name or if the folder cannot be written."""
    usable_path(path)
    if path.exists() and not path.is_dir():
        raise GatelensError(f"{path} is a file: give a folder, or a name that does not exist yet.")
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)


def write_folder(path: Path, write: Callable[[Path], None], *, replace: bool = False) -> None:
    """Create a folder that is either complete or absent.

    If another process creates the folder at the same time, the first one wins.

    Arguments:
        path: the folder. Unless it is replaced, it must not exist yet.
        write: writes the contents into the temporary folder that it is given.
        replace: replace the folder that exists, with all its contents.
    """
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", suffix=".tmp", dir=path.parent))
    folder = temporary / path.name  # mkdtemp makes a folder that only its owner may read
    try:
        with writing(path):
            folder.mkdir()
            write(folder)
            follow_umask(folder)
            if replace and path.exists():
                _exchange(folder, path)
            else:
                _move(folder, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(folder: Path, path: Path) -> None:
    try:
        folder.rename(path)
    except OSError:
        if not path.exists():  # otherwise another process was faster, and its folder has the same contents
            raise


def _exchange(folder: Path, path: Path) -> None:
    """Swap two folders in one step, so that there is always one. Where the system cannot do this, in two steps."""
    libc = ctypes.CDLL(None, use_errno=True)
    swap = getattr(libc, "renameat2", None)  # Linux
    if swap is not None and swap(_HERE, os.fsencode(folder), _HERE, os.fsencode(path), _SWAP) == 0:
        return
    old = folder.with_name(f"{path.name}.old")
    path.rename(old)
    try:
        folder.rename(path)
    except OSError:
        old.rename(path)
        raise


_HERE, _SWAP = -100, 2  # AT_FDCWD and RENAME_EXCHANGE


def follow_umask(folder: Path) -> None:
    """Give all files in a folder the mode that the umask gives: safetensors makes files that only their owner reads."""
    probe = folder / ".umask.tmp"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(mode)


def remove_half_written(folder: Path) -> None:
    """Remove the temporary files and folders of an earlier process that was killed while it wrote."""
    for temporary in folder.glob("*.tmp"):
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def replace_file(path: Path, text: str) -> None:
    """Write a text file. A character that is not text (half of a surrogate pair) becomes a question mark."""
    with replacing(path) as temporary:
        temporary.write_text(text, newline="", encoding="utf-8", errors="replace")


def write_json(path: Path, data: Any) -> None:
    """Write JSON with sorted keys."""
    replace_file(path, json.dumps(data, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a run folder."""
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GatelensError(f"{path.parent} is not a complete run of gatelens: it has no {path.name}.") from error
    except (OSError, ValueError) as error:
        raise GatelensError(f"cannot read {path} ({error}): the folder is damaged; run the job again.") from error
    if not isinstance(data, dict):
        raise GatelensError(f"{path} was not written by gatelens: it should hold a JSON object.")
    return data


def write_csv(path: Path, header: Sequence[str], records: Iterable[Sequence[Any]]) -> None:
    """Write a table. Floats have six significant digits.

    A text that a spreadsheet would take for a formula, because it begins with one of = + - @, gets an apostrophe.
    """
    text = StringIO(newline="")
    csv.writer(text).writerows([_cell(cell) for cell in record] for record in (header, *records))
    replace_file(path, text.getvalue())


def _cell(cell: Any) -> Any:
    if isinstance(cell, float):
        return f"{cell:.6g}"
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell


def read_numbers(path: Path) -> tuple[list[str], list[dict[str, float]]]:
    """Read the numbers of a CSV file to which a run appends lines.

    A line that a killed run left incomplete is skipped.

    Returns:
        The columns, and one record per line. A record does not have the columns whose cell is empty.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            complete = [record for record in reader if None not in record and None not in record.values()]
        records = [{name: float(cell) for name, cell in record.items() if cell} for record in complete]
    except (OSError, ValueError, csv.Error) as error:
        raise GatelensError(f"cannot read {path} ({error}): remove the damaged file, or run the job again.") from error
    return list(reader.fieldnames or ()), records


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as safetensors, with the file mode that the umask gives."""
    separate: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        separate[name] = tensor.detach().cpu().contiguous()
        storage = separate[name].untyped_storage().data_ptr()
        if storage in storages:  # safetensors refuses tensors that share memory, such as views of one curve
            separate[name] = separate[name].clone()
        storages.add(storage)
    with replacing(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        save_file(separate, temporary)
        temporary.chmod(mode)  # safetensors makes files that only their owner may read


class SavedTensors(dict[str, Tensor]):
    """The tensors of a file by name. An error says which one is missing."""

    def __init__(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.path = path

    def __missing__(self, name: str) -> Tensor:
        raise GatelensError(f"{self.path} has no tensor '{name}': run the job again.")


def read_tensors(path: Path) -> SavedTensors:
    """The tensors of a safetensors file in a run folder."""
    try:
        return SavedTensors(path, load_file(path))
    except (OSError, SafetensorError) as error:
        raise GatelensError(f"cannot read {path} ({error}): the folder is damaged; run the job again.") from error


def is_about_files(error: Exception) -> bool:
    """Whether the operating system raised this error about a file.

    safetensors and torch wrap such errors in types of their own and keep only the text, so the text has to decide.
    """
    fragments = ("os error", "PytorchStreamWriter", "inline_container")
    return isinstance(error, OSError) or any(fragment in str(error) for fragment in fragments)
