"""Which dense run a sparse one is compared with.

This is the only place that decides it, so that summary tables, figures and the report page state the same multiplier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gatelens.model.graph import Graph

MUST_AGREE = ("level", "method", "threshold", "ranking", "source", "seed")
"""Settings that must agree for two counts to be comparable. Others, such as ``n``, may differ between the models."""


@dataclass(frozen=True, eq=False)
class ComparedRun:
    """What pairing needs to know about a saved circuit.

    Arguments:
        model: the name of the model.
        sparse: whether its attention is gated.
        task: the name of the task.
        settings: the settings of the run, by name.
        dense: the name of the dense model, if the run itself says so (the field ``dense`` in its files).
        shape: the component graph of the model; None if it was not saved.
    """

    model: str
    sparse: bool
    task: str
    settings: Mapping[str, Any]
    dense: str | None = None
    shape: Graph | None = None


def dense_run_of(sparse: ComparedRun, runs: Iterable[ComparedRun]) -> ComparedRun | None:
    """The run of the dense model that a sparse run is compared with.

    The model is chosen by `dense_model_of`. If several runs of this model can be compared, the one with the fewest
    different settings is chosen: in a study with a grid of settings, the run at the same point of the grid.

    Arguments:
        sparse: the run of the sparse model.
        runs: all runs of a study or of a report. Runs of other tasks or with other settings are ignored.

    Returns:
        The dense run, or None if there is no such run or if several runs fit equally well.
    """
    comparable = [run for run in runs if run is not sparse and _comparable(run, sparse)]
    model = dense_model_of(sparse, comparable)
    candidates = [run for run in comparable if run.model == model]
    differences = [_n_differences(run.settings, sparse.settings) for run in candidates]
    best = [run for run, n in zip(candidates, differences, strict=True) if n == min(differences)]
    return best[0] if len(best) == 1 else None


def dense_model_of(sparse: ComparedRun, runs: Sequence[ComparedRun]) -> str | None:
    """The name of the dense model that a sparse model belongs to.

    1. What the run itself says (``sparse.dense``), if there is a run of this model.
    2. Otherwise the only dense model of the same shape. A shape that was not saved counts as the same.
    3. Otherwise, of the dense models of this shape, the one whose name is contained in the name of the sparse model.
       The longest such name counts: ``sparse-gpt2-medium`` contains both ``gpt2`` and ``gpt2-medium``.

    A run that is not sparse and does not name a dense model has none.

    Returns:
        The name of the model, or None if no rule decides.
    """
    if sparse.dense is not None:
        return sparse.dense if any(run.model == sparse.dense for run in runs) else None
    if not sparse.sparse:
        return None
    same_shape = dict.fromkeys(run.model for run in runs if not run.sparse and _may_have_the_same_shape(run, sparse))
    if len(same_shape) == 1:
        return next(iter(same_shape))
    contained = [name for name in same_shape if name in sparse.model]
    return max(contained, key=len, default=None)


def _comparable(run: ComparedRun, other: ComparedRun) -> bool:
    return run.task == other.task and all(run.settings.get(name) == other.settings.get(name) for name in MUST_AGREE)


def _may_have_the_same_shape(run: ComparedRun, other: ComparedRun) -> bool:
    return run.shape is None or other.shape is None or run.shape == other.shape


def _n_differences(settings: Mapping[str, Any], others: Mapping[str, Any]) -> int:
    return sum(settings.get(name) != others.get(name) for name in {*settings, *others})
