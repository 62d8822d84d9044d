"""Run one cell of a study, whatever may happen to it: the part that every engine shares."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from gatelens.errors import GatelensError
from gatelens.jobs.circuit import find_circuit
from gatelens.jobs.roles import find_roles
from gatelens.jobs.study.cells import Cell, ModelSpec
from gatelens.jobs.study.folder import Outcome, StudyFolder
from gatelens.measures.circuit_result import CircuitSettings
from gatelens.model import Model
from gatelens.runtime.journal import Progress
from gatelens.sparse.in_model import is_sparse

Open = Callable[[ModelSpec], Model]
_NO_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")  # of torch, CUDA, cuBLAS


class OneModel:
    """Gives models, and keeps the last one: cells of the same model in a row load it once."""

    def __init__(self) -> None:
        self._spec: ModelSpec | None = None
        self._model: Model | None = None
        self._failed: dict[ModelSpec, Exception] = {}  # not tried again for every cell

    def __call__(self, spec: ModelSpec) -> Model:
        if spec in self._failed:
            raise self._failed[spec]
        if self._model is None or self._spec != spec:
            self._model = None  # before the next one is read: there may be room for one only
            free_memory()
            try:
                self._model, self._spec = spec.open(), spec
            except Exception as error:
                self._failed[spec] = error.with_traceback(None)  # whose frames would keep memory
                raise
        return self._model


def run_cell(
    cell: Cell,
    out: Path,
    open_model: Open,
    *,
    progress: Progress | None = None,
    wait: bool = False,
    since: float | None = None,
) -> Outcome | None:
    """Run a cell in the study's folder, or continue it, or see that it is done. It fails with a reason, never raises.

    None if another process is at work on it; with ``wait``, wait for that one and take over what it leaves.
    since: a failure that was recorded after this time (of another process) is not tried again.
    """
    folder = StudyFolder(out)
    fingerprint, begun = "", time.time()
    try:
        fingerprint = cell.fingerprint()
        with folder.lock(cell).acquire(timeout=-1 if wait else 0):
            before = folder.outcome(cell)
            if folder.is_done(cell, before):
                return before
            if before.status == "failed" and since is not None and (before.ended or 0) >= since:
                return before
            if before.fingerprint not in ("", fingerprint):
                folder.set_aside(cell, before)
            outcome = Outcome(cell.name, "running", fingerprint, process=os.getpid())
            folder.write(cell, outcome)
            outcome = replace(outcome, **_run(cell, folder.run_folder(cell), open_model, progress))
            outcome = replace(outcome, ended=time.time())
            folder.write(cell, outcome)
            return outcome
    except Timeout:
        return None
    except OSError as error:  # not even the record could be written
        said = f"cannot write to {out}: {error.strerror or error}."
        return Outcome(cell.name, "failed", fingerprint, reason=said, process=os.getpid(), ended=begun)


def _run(cell: Cell, folder: Path, open_model: Open, progress: Progress | None) -> dict[str, Any]:
    """The work itself: what is to be recorded of it."""
    begun = time.monotonic()
    try:
        model = open_model(cell.model)
        try:
            return _find(cell, model, folder, progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        return _find(cell.half_memory(), model, folder, progress)
    except Exception as error:  # whatever it is: the other cells go on
        foreseen = isinstance(error, GatelensError | OSError) or is_out_of_memory(error)
        return {
            "status": "failed",
            "reason": reason(error, folder),
            "trace": None if foreseen else "".join(traceback.format_exception(error)),
            "seconds": time.monotonic() - begun,
        }


def _find(cell: Cell, model: Model, folder: Path, progress: Progress | None) -> dict[str, Any]:
    about: dict[str, Any] = {"status": "done", "sparse": is_sparse(model.hf)}
    common: dict[str, Any] = {"out": folder, "options": cell.whole_options, "progress": progress}
    if isinstance(cell.settings, CircuitSettings):
        circuit = find_circuit(model, cell.where, cell.settings, dense=cell.model.dense, **common)
        return {**about, "count": circuit.count, "total": circuit.curve.total, "seconds": circuit.seconds}
    roles = find_roles(model, cell.where, cell.settings, **common)
    heads = roles.roles.gates[0].numel()
    needed = round(roles.roles.summary()["facilitation"]["all seeds"] * heads)
    return {**about, "count": float(needed), "total": heads, "seconds": roles.seconds}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on the processor or on a device."""
    said = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and any(words in said for words in _NO_MEMORY)
    )


def free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason(error: Exception, folder: Path) -> str:
    """Why a cell failed, in one sentence."""
    said = " ".join(str(error).split())
    if isinstance(error, GatelensError):
        return said
    if is_out_of_memory(error):
        return f"out of memory ({said[:200]}): ask for fewer prompts or less memory_gb, or take a larger machine."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or folder}. The same command continues once that is mended."
    if "os error 28" in said:  # as safetensors reports it
        return f"No space left on device: {folder}. The same command continues once that is mended."
    return f"{type(error).__name__}: {said[:500]}"
