"""The tables of heads of a study's sparse models get the same heads of their dense models beside them.

The best heads of a sparse model are known when its cells are done. The dense model is loaded then, once for all of its
sparse models, because a study keeps one model in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gatelens.jobs.circuit_tasks import circuit_tasks
from gatelens.jobs.described import dense_lines
from gatelens.jobs.study._cells import Cell
from gatelens.jobs.study._folder import Outcome, StudyFolder
from gatelens.jobs.study._work import OpenModel, reason_of
from gatelens.jobs.study.file import Study
from gatelens.jobs.study.summary import load_circuits
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.head_table import save_head_table
from gatelens.measures.pairing import dense_circuit_of
from gatelens.model import Model
from gatelens.runtime.context import Context


def describe_dense_heads(
    study: Study,
    folder: StudyFolder,
    outcomes: Mapping[str, Outcome],
    open_model: OpenModel,
    show: Callable[[str], None],
) -> list[str]:
    """Complete the tables of all sparse circuits that have a dense one in the study, where they are not complete.

    Arguments:
        show: is called with what is being done.

    Returns:
        Why a table could not be completed, one sentence for each dense model. The report then shows what the run of the
        dense model has saved.
    """
    circuits = load_circuits(study.cells, outcomes, folder)
    cells = {cell.name: cell for cell in study.cells}
    incomplete: dict[str, list[tuple[Cell, CircuitResult]]] = {}  # by the dense model
    for name, circuit in circuits.items():
        dense = dense_circuit_of(circuit, circuits.values())
        if dense is not None and circuit.heads is not None and circuit.heads.dense is None:
            incomplete.setdefault(dense.model, []).append((cells[name], circuit))
    problems: list[str] = []
    for label, sparse_circuits in incomplete.items():
        show(f"heads of {label}")
        try:
            dense_model = open_model(study.models[label])
            for cell, circuit in sparse_circuits:
                with folder.lock(cell):
                    _complete(cell, circuit, dense_model, folder)
        except Exception as error:  # any error: the cells are done, and their own numbers stay
            problems.append(f"the heads of {label} are not described: {reason_of(error, folder.out)}")
    return problems


def _complete(cell: Cell, circuit: CircuitResult, dense: Model, folder: StudyFolder) -> None:
    settings = circuit.settings
    task = circuit_tasks(dense, cell.where, settings.replace(seeds=1), cell.task_options).first
    if circuit.heads is not None and circuit.curve.fingerprints[:1] == (task.fingerprint(),):
        table = dense_lines(circuit.heads, task, dense, Context(settings.memory_gb))
        save_head_table(table, folder.run_folder(cell))
