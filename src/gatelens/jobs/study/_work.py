"""Run one cell of a study. Every engine uses this. A cell that fails is recorded with the reason, and never raises."""

from __future__ import annotations

import gc
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from filelock import Timeout

from gatelens.errors import GatelensError
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import Outcome, StudyFolder
from gatelens.jobs.study.models import ModelSpec
from gatelens.model import Model
from gatelens.runtime.files import is_about_files
from gatelens.runtime.journal import Progress

OpenModel = Callable[[ModelSpec], Model]
# torch's allocator for the CPU, and cuBLAS, raise a RuntimeError without a type of its own.
_OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory", "ALLOC_FAILED")


class OneModel:
    """Loads models and keeps the last one, so that successive cells of one model load it once."""

    def __init__(self) -> None:
        self._spec: ModelSpec | None = None
        self._model: Model | None = None
        self._failures: dict[ModelSpec, Exception] = {}  # a model that cannot be loaded is not tried for every cell

    def __call__(self, spec: ModelSpec) -> Model:
        if spec in self._failures:
            raise self._failures[spec]
        if self._model is None or self._spec != spec:
            self._model = None  # released first: there may be memory for one model only
            free_memory()
            try:
                self._model, self._spec = spec.open_model(), spec
            except Exception as error:
                self._failures[spec] = error.with_traceback(None)  # the frames of the traceback would keep memory
                raise
        return self._model


def run_cell(
    cell: Cell,
    out: Path,
    open_model: OpenModel,
    *,
    progress: Progress | None = None,
    wait: bool = False,
    since: float | None = None,
) -> Outcome | None:
    """Run a cell in the folder of its study, or resume it, or find that it is done.

    Arguments:
        out: the folder of the study.
        wait: wait for another process that works on the cell, and take over what it leaves.
        since: a failure that another process recorded after this time is not tried again.

    Returns:
        The outcome, or None if another process works on the cell and ``wait`` is off.
    """
    folder = StudyFolder(out)
    fingerprint, started = "", time.time()
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
            outcome = Outcome.new(cell.name, "running", fingerprint=fingerprint, process=os.getpid())
            folder.write(cell, outcome)
            outcome = outcome.replace(**_run(cell, folder.run_folder(cell), open_model, progress), ended=time.time())
            folder.write(cell, outcome)
            return outcome
    except Timeout:
        return None
    except OSError as error:  # the state itself could not be written
        remedy = "free some disk space and run the same command again to resume."
        own = f"cannot write to {out} ({error.strerror or error}): {remedy}"
        reason = str(error) if isinstance(error, GatelensError) else own
        return Outcome.new(
            cell.name, "failed", fingerprint=fingerprint, reason=reason, process=os.getpid(), ended=started
        )


def _run(cell: Cell, folder: Path, open_model: OpenModel, progress: Progress | None) -> dict[str, Any]:
    """Run a cell, a second time with half the memory budget if memory runs out. Returns fields of the outcome."""
    started = time.monotonic()
    try:
        model = open_model(cell.model)
        try:
            return _run_job(cell, model, folder, progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory()
        return _run_job(cell.half_memory(), model, folder, progress)
    except Exception as error:  # any error: the other cells continue
        expected = isinstance(error, GatelensError | OSError) or is_out_of_memory(error)
        return {
            "status": "failed",
            "reason": reason_of(error, folder),
            "trace": None if expected else "".join(traceback.format_exception(error)),
            "seconds": time.monotonic() - started,
        }


def _run_job(cell: Cell, model: Model, folder: Path, progress: Progress | None) -> dict[str, Any]:
    finding = cell.job.run(
        model,
        cell.where,
        cell.settings,
        out=folder,
        options=cell.task_options,
        dense=cell.model.dense,
        progress=progress,
    )
    return {"status": "done", **finding.columns()}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on the CPU or on a device."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def free_memory() -> None:
    """Release the memory of models and batches that are not used any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reason_of(error: Exception, folder: Path) -> str:
    """Why a cell failed, in one sentence."""
    message = " ".join(str(error).split())
    if isinstance(error, GatelensError):
        return message
    if is_out_of_memory(error):
        return f"out of memory ({message[:200]}): ask for fewer prompts or a lower memory_gb, or use a larger machine."
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename or folder}. Run the same command again after solving this."
    if is_about_files(error):
        return f"cannot read or write in {folder} ({message[:200]}). Run the same command again after solving this."
    return f"{type(error).__name__}: {message[:500]}"
