"""Distributions of a dense model on disk, so that a training step needs no dense forward.

A cache is a folder. `teacher.json` says which model it is of; `N.records` has one record for each sequence of N tokens,
in the order in which they were first read:

    key        32 bytes           SHA-256 of the tokens
    tokens     (N, k) int32       the most probable next tokens
    log_probs  (N, k) float32
    log_rest   (N,) float32       logarithm of the mass of all other tokens
    of_next    (N,) float32       log-probability of the token that follows
    checksum   uint32             CRC-32 of all bytes before it

Records are found by their key, so that any run that reads the same sequences uses them: runs of a sweep, or a run that
was killed. Files only grow, one append at a time, and are mapped into memory: of a large cache, only the records that
are read take memory. A record that a killed process left incomplete is overwritten, and one whose checksum is wrong
counts as missing.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from jaxtyping import Int
from numpy.typing import NDArray
from torch import Tensor

from gatelens.errors import GatelensError
from gatelens.runtime.files import make_folder, read_json, write_json, writing
from gatelens.runtime.run_folder import LOCK, is_marked
from gatelens.sparse.sparsify._top_k import TopK

ABOUT = "teacher.json"


class TeacherCache:
    """The records of one folder.

    Arguments:
        folder: is created if it does not exist.
        about: what identifies the dense model and its precision. A folder of another one is refused.
        top: tokens of each distribution.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], top: int) -> None:
        self.folder, self.top = folder, top
        make_folder(folder)
        asked = {**about, "top": top}
        with writing(folder), FileLock(folder / LOCK):
            if not is_marked(folder, ABOUT, "a teacher cache"):
                write_json(folder / ABOUT, asked)
        saved = read_json(folder / ABOUT)
        different = [name for name in asked if asked[name] != saved.get(name)]
        if different:
            raise GatelensError(
                f"the teacher cache {folder} was made with another {' and '.join(different)}: give another folder."
            )
        self._files: dict[int, _RecordFile] = {}

    def read(self, tokens: Int[Tensor, "sequence token"], compute: Callable[[Tensor], TopK]) -> TopK:
        """The distributions of these sequences, on the CPU.

        If any of them is missing, all are computed, as one batch, so that a run that is resumed gets the same numbers.

        Arguments:
            compute: runs the dense model.
        """
        length = tokens.shape[1]
        if length not in self._files:
            path, lock = self.folder / f"{length}.records", FileLock(self.folder / LOCK)
            self._files[length] = _RecordFile(path, _record_type(length, self.top), lock)
        file = self._files[length]
        keys = [hashlib.sha256(row.tobytes()).digest() for row in tokens.cpu().to(torch.int32).numpy()]
        missing = {key: number for number, key in enumerate(keys) if not file.has(key)}
        if missing:
            computed = compute(tokens)
            rows = list(missing.values())
            file.append(list(missing), TopK(*(x[rows].cpu() for x in computed)))
        records = file.read(keys)
        return TopK(*(torch.from_numpy(np.ascontiguousarray(records[name])) for name in TopK._fields))


class _RecordFile:
    """All records of one length, with their places by key."""

    def __init__(self, path: Path, record: np.dtype[Any], lock: FileLock) -> None:
        self.path, self.record, self.lock = path, record, lock
        self._places: dict[bytes, int] = {}
        self._records: NDArray[Any] = np.empty(0, record)
        if path.exists():
            self._map(path.stat().st_size // record.itemsize)
            self._places = {key.tobytes(): place for place, key in enumerate(self._records["key"])}

    def has(self, key: bytes) -> bool:
        """Whether there is a record with this key that is not damaged."""
        if key not in self._places:
            return False
        record = self._records[self._places[key]]
        return bool(_checksum(record) == record["checksum"])

    def read(self, keys: list[bytes]) -> NDArray[Any]:
        """The records with these keys, copied into memory."""
        return self._records[[self._places[key] for key in keys]]

    def append(self, keys: list[bytes], values: TopK) -> None:
        """Write new records to the end of the file."""
        records = np.zeros(len(keys), self.record)
        records["key"] = np.frombuffer(b"".join(keys), "u1").reshape(len(keys), -1)
        for name, value in values._asdict().items():
            records[name] = value.numpy()
        records["checksum"] = [_checksum(record) for record in records]
        with writing(self.path.parent), self.lock, self.path.open("ab") as file:
            first = file.tell() // self.record.itemsize
            file.truncate(first * self.record.itemsize)
            file.write(records.tobytes())
        self._map(first + len(keys))
        self._places |= {key: first + number for number, key in enumerate(keys)}

    def _map(self, count: int) -> None:
        self._records = np.memmap(self.path, self.record, "r", shape=(count,)) if count else np.empty(0, self.record)


def _record_type(length: int, top: int) -> np.dtype[Any]:
    return np.dtype(
        [
            ("key", "u1", (32,)),
            ("tokens", "<i4", (length, top)),
            ("log_probs", "<f4", (length, top)),
            ("log_rest", "<f4", (length,)),
            ("of_next", "<f4", (length,)),
            ("checksum", "<u4"),
        ]
    )


def _checksum(record: Any) -> int:
    return zlib.crc32(record.tobytes()[:-4])
