"""The multiplier at several thresholds: does the comparison of two models depend on where gates are counted?

No threshold is the right one, and a published multiplier whose threshold is not known cannot be compared with a single
number. Lines are made from saved circuits, so they cost no run of a model. Curves are refined around one threshold,
and around others if ``also_at`` names them. Elsewhere, a count is the next point of a coarser grid, and its interval
contains every number of gates down to the point before it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pydantic import Field

from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.counts import MultiplierColumns
from gatelens.measures.curves import multiplier
from gatelens.measures.pairing import dense_circuit_of

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""The explained effects at which gates are counted."""


class ThresholdLine(MultiplierColumns):
    """A sparse circuit compared with its dense one at one threshold: a line of ``thresholds.csv``.

    The multiplier is None if one of the curves does not reach the threshold.
    """

    level: str
    method: str
    task: str
    dense: str = Field(description="the dense model")
    sparse: str = Field(description="the sparse model")
    threshold: float = Field(description="the explained effect at which gates are counted")
    refined: bool = Field(description="whether the grids of both curves were refined around this threshold")
    dense_count: str = Field(description="gates that the dense model needs, with interval and number of prompts")
    sparse_count: str = Field(description="gates that the sparse model needs, with interval and number of prompts")
    shown: str = Field(default="-", description="the multiplier as it is printed, with interval and number of prompts")


def threshold_lines(circuits: Iterable[CircuitResult]) -> list[ThresholdLine]:
    """Compare every sparse circuit with its dense one at all `THRESHOLDS`, and where the curves were refined.

    Example:
        >>> for line in threshold_lines(map(load_circuit, folders)):
        ...     print(line.task, line.threshold, line.shown)
        ioi 0.5 1.75x (1.31 to 2.40; 64 held-out prompts)

    Arguments:
        circuits: saved circuits of dense and sparse models. `gatelens.measures.pairing` says which belong together.

    Returns:
        Lines in the order of the circuits, then of the thresholds. Circuits without a dense one have none.
    """
    results = list(circuits)
    pairs = ((dense_circuit_of(sparse, results), sparse) for sparse in results)
    return [
        _line(dense, sparse, threshold)
        for dense, sparse in pairs
        if dense is not None
        for threshold in sorted({*THRESHOLDS, sparse.settings.threshold, *sparse.settings.refined_at})
    ]


def _line(dense: CircuitResult, sparse: CircuitResult, threshold: float) -> ThresholdLine:
    refined = all(threshold in circuit.settings.refined_at for circuit in (dense, sparse))
    counts = [circuit.curve.counted(threshold, coarse=not refined) for circuit in (dense, sparse)]
    reached = all(count.value is not None for count in counts)
    ratio = multiplier(dense.curve, sparse.curve, threshold, coarse=not refined) if reached else None
    return ThresholdLine(
        level=sparse.settings.level,
        method=sparse.settings.method,
        task=sparse.task,
        dense=dense.model,
        sparse=sparse.model,
        threshold=threshold,
        refined=refined,
        dense_count=str(counts[0]),
        sparse_count=str(counts[1]),
        shown="-" if ratio is None else str(ratio),
        **({} if ratio is None else dict(ratio.columns())),
    )
