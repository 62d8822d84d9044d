"""Which dense run a sparse one is compared with: what the run says, then its shape, then its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.curves import Curve
from gatelens.measures.pairing import dense_circuit_of, dense_model_of, multiplier_of
from gatelens.measures.validity import Validity
from gatelens.model.graph import Graph

SMALL, LARGE = Graph(2, 4, 4), Graph(3, 4, 4)
VALIDITY = Validity(correlation=None, sampled=0, kept=0.0, effect=0.0, complement=0.0, overlap=None)


def run(
    model: str,
    *,
    sparse: bool = False,
    task: str = "ioi",
    dense: str | None = None,
    graph: Graph | None = None,
    needed: int = 4,
    **settings: Any,
) -> CircuitResult:
    """A circuit that reaches 0.95 of the effect with ``needed`` of 8 gates."""
    metrics = torch.tensor([0.0, 0.95, 1.0])[None, :, None]
    kept = torch.tensor([0.0, needed, 8.0])
    curve = Curve("heads", 8, [0, needed, 8], kept, metrics, metrics[:, 0], metrics[:, -1])
    made = CircuitSettings(**{"level": "heads", "method": "eap", "n": 16, **settings})
    return CircuitResult(model, task, made, [], curve, VALIDITY, 1.0, sparse, dense, graph)


def test_the_run_itself_decides() -> None:
    runs = [run("gpt2", graph=SMALL), run("teacher", graph=LARGE)]
    sparse = run("sparse-gpt2", sparse=True, graph=SMALL, dense="teacher")
    assert dense_model_of(sparse, runs) == "teacher"
    assert dense_circuit_of(sparse, [*runs, sparse]) is runs[1]


def test_a_named_model_without_a_run_is_not_replaced_by_another() -> None:
    sparse = run("sparse-gpt2", sparse=True, dense="teacher")
    assert dense_model_of(sparse, [run("gpt2")]) is None


def test_a_model_that_is_not_gated_may_name_the_one_it_is_compared_with() -> None:
    first, second = run("first"), run("second", dense="first")
    assert dense_circuit_of(second, [first, second]) is first
    assert dense_circuit_of(first, [first, second]) is None


@pytest.mark.parametrize(
    ("dense", "expected"),
    [
        ([("gpt2", SMALL)], "gpt2"),
        ([("gpt2", SMALL), ("other", LARGE)], "gpt2"),  # the only one of its shape
        ([("gpt2", None)], "gpt2"),  # the shape was not saved
        ([("other", LARGE)], None),
        ([("gpt2", SMALL), ("other", SMALL)], None),  # neither name is contained in "thin"
        ([], None),
    ],
)
def test_otherwise_the_only_dense_model_of_the_same_shape(
    dense: list[tuple[str, Graph | None]], expected: str | None
) -> None:
    runs = [run(name, graph=shape) for name, shape in dense]
    assert dense_model_of(run("thin", sparse=True, graph=SMALL), runs) == expected


def test_otherwise_the_longest_name_that_the_sparse_name_contains() -> None:
    runs = [run("gpt2"), run("gpt2-medium"), run("llama")]
    assert dense_model_of(run("sparse-gpt2-medium", sparse=True), runs) == "gpt2-medium"
    assert dense_model_of(run("sparse-gpt2", sparse=True), runs) == "gpt2"
    assert dense_model_of(run("thin", sparse=True), runs) is None


def test_another_sparse_model_is_not_a_dense_one() -> None:
    first, second = run("sparse-a", sparse=True), run("sparse-b", sparse=True)
    assert dense_circuit_of(first, [first, second]) is None


@pytest.mark.parametrize(
    "different",
    [{"task": "docstring"}, {"level": "edges"}, {"threshold": 0.5}, {"ranking": "signed"}, {"source": "zero"}],
)
def test_runs_whose_counts_cannot_be_compared_are_ignored(different: dict[str, Any]) -> None:
    sparse = run("sparse-gpt2", sparse=True)
    assert dense_circuit_of(sparse, [run("gpt2", **different), sparse]) is None


def test_in_a_grid_the_run_at_the_same_point_counts() -> None:
    dense = [run("gpt2", steps=steps) for steps in (1, 5)]
    sparse = [run("sparse-gpt2", sparse=True, steps=steps, n=8) for steps in (1, 5)]  # n is another for this model
    for i in range(2):
        assert dense_circuit_of(sparse[i], [*dense, *sparse]) is dense[i]


def test_two_runs_that_fit_equally_well_decide_nothing() -> None:
    sparse = run("sparse-gpt2", sparse=True)
    assert dense_circuit_of(sparse, [run("gpt2"), run("gpt2"), sparse]) is None


def test_the_multiplier_is_dense_over_sparse_at_the_threshold() -> None:
    dense, sparse = run("gpt2", needed=6), run("sparse-gpt2", sparse=True, needed=3)
    assert float(multiplier_of(dense, sparse)) == 2.0
    assert multiplier_of(None, sparse) is None


def test_a_curve_that_does_not_reach_the_threshold_has_no_multiplier() -> None:
    dense, sparse = run("gpt2"), run("sparse-gpt2", sparse=True)
    low = replace(dense, curve=replace(dense.curve, metrics=dense.curve.metrics * 0.5))
    assert multiplier_of(low, sparse) is None
    assert multiplier_of(dense, replace(sparse, curve=low.curve)) is None


def test_settings_that_only_one_run_has_count_as_differences() -> None:
    """An identity leaves out the tests, the stability and the options of the method while they have their default."""
    plain, tested = run("gpt2", graph=SMALL), run("gpt2", graph=SMALL, tests=True, stability=2)
    sparse = run("sparse-gpt2", sparse=True, graph=SMALL)
    assert dense_circuit_of(sparse, [tested, plain, sparse]) is plain
    assert dense_circuit_of(replace(sparse, settings=tested.settings), [tested, plain]) is tested
