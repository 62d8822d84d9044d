"""Which dense circuit a sparse one is compared with.

This is the only place that decides it, so that summary tables, figures and the report page state the same multiplier.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.counts import Multiplier
from gatelens.measures.curves import multiplier

MUST_AGREE = ("level", "method", "threshold", "ranking", "selection", "source", "seed", "held_out")
"""Settings that must agree for two counts to be comparable. Others, such as ``n``, may differ between the models."""


def dense_circuit_of(sparse: CircuitResult, circuits: Iterable[CircuitResult]) -> CircuitResult | None:
    """The circuit of the dense model that a sparse one is compared with.

    The model is chosen by `dense_model_of`. If several circuits of this model can be compared, the one with the fewest
    different settings is chosen: in a study with a grid of settings, the one at the same point of the grid.

    Arguments:
        sparse: the circuit of the sparse model.
        circuits: all circuits of a study or of a report. Those of other tasks or with other settings are ignored.

    Returns:
        The dense circuit, or None if there is no such circuit or if several fit equally well.
    """
    comparable = [circuit for circuit in circuits if circuit is not sparse and _comparable(circuit, sparse)]
    model = dense_model_of(sparse, comparable)
    candidates = [circuit for circuit in comparable if circuit.model == model]
    differences = [_n_differences(circuit, sparse) for circuit in candidates]
    best = [circuit for circuit, n in zip(candidates, differences, strict=True) if n == min(differences)]
    return best[0] if len(best) == 1 else None


def dense_model_of(sparse: CircuitResult, circuits: Sequence[CircuitResult]) -> str | None:
    """The name of the dense model that a sparse model belongs to.

    1. What the run itself says (``dense`` in its ``result.json``), if there is a circuit of this model.
    2. Otherwise the only dense model of the same shape. A shape that was not saved counts as the same.
    3. Otherwise, of the dense models of this shape, the one whose name is contained in the name of the sparse model.
       The longest such name counts: ``sparse-gpt2-medium`` contains both ``gpt2`` and ``gpt2-medium``.

    A model that is not sparse belongs to another one only if its run says so.

    Returns:
        The name of the model, or None if no rule decides.
    """
    if sparse.dense is not None:
        return sparse.dense if any(circuit.model == sparse.dense for circuit in circuits) else None
    if not sparse.sparse:
        return None
    same_shape = dict.fromkeys(
        circuit.model for circuit in circuits if not circuit.sparse and _may_have_the_same_shape(circuit, sparse)
    )
    if len(same_shape) == 1:
        return next(iter(same_shape))
    return max((name for name in same_shape if name in sparse.model), key=len, default=None)


def multiplier_of(dense: CircuitResult | None, sparse: CircuitResult) -> Multiplier | None:
    """Dense count / sparse count at the threshold of the circuits.

    Returns:
        The multiplier, or None if there is no dense circuit or if one of the curves does not reach the threshold.
    """
    if dense is None or dense.count.value is None or sparse.count.value is None:
        return None
    return multiplier(dense.curve, sparse.curve, sparse.settings.threshold)


def _comparable(circuit: CircuitResult, other: CircuitResult) -> bool:
    same_settings = all(getattr(circuit.settings, name) == getattr(other.settings, name) for name in MUST_AGREE)
    return circuit.task == other.task and same_settings


def _may_have_the_same_shape(circuit: CircuitResult, other: CircuitResult) -> bool:
    return circuit.graph is None or other.graph is None or circuit.graph == other.graph


def _n_differences(circuit: CircuitResult, other: CircuitResult) -> int:
    # An identity leaves out some settings that have their default, so the two may not have the same names.
    settings, others = circuit.settings.identity(), other.settings.identity()
    return sum(settings.get(name) != others.get(name) for name in {*settings, *others})
