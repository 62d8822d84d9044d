"""Which dense run a sparse one is compared with: what the run says, then its shape, then its name."""

from __future__ import annotations

from typing import Any

import pytest

from gatelens.measures.pairing import ComparedRun, dense_model_of, dense_run_of
from gatelens.model.graph import Graph

SMALL, LARGE = Graph(2, 4, 4), Graph(3, 4, 4)
SETTINGS: dict[str, Any] = {
    "level": "heads",
    "method": "eap",
    "threshold": 0.9,
    "ranking": "absolute",
    "source": "corrupt",
    "seed": 0,
    "steps": 1,
    "n": 16,
}


def run(model: str, *, sparse: bool = False, task: str = "ioi", **more: Any) -> ComparedRun:
    """A run; settings that are given replace those above."""
    given = {key: more.pop(key) for key in ("dense", "shape") if key in more}
    return ComparedRun(model, sparse, task, SETTINGS | more, **given)


def test_the_run_itself_decides() -> None:
    runs = [run("gpt2", shape=SMALL), run("teacher", shape=LARGE)]
    sparse = run("sparse-gpt2", sparse=True, shape=SMALL, dense="teacher")
    assert dense_model_of(sparse, runs) == "teacher"
    assert dense_run_of(sparse, [*runs, sparse]) is runs[1]


def test_a_named_model_without_a_run_is_not_replaced_by_another() -> None:
    sparse = run("sparse-gpt2", sparse=True, dense="teacher")
    assert dense_model_of(sparse, [run("gpt2")]) is None


def test_a_model_that_is_not_gated_may_name_the_one_it_is_compared_with() -> None:
    first, second = run("first"), run("second", dense="first")
    assert dense_run_of(second, [first, second]) is first
    assert dense_run_of(first, [first, second]) is None


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
    runs = [run(name, shape=shape) for name, shape in dense]
    assert dense_model_of(run("thin", sparse=True, shape=SMALL), runs) == expected


def test_otherwise_the_longest_name_that_the_sparse_name_contains() -> None:
    runs = [run("gpt2"), run("gpt2-medium"), run("llama")]
    assert dense_model_of(run("sparse-gpt2-medium", sparse=True), runs) == "gpt2-medium"
    assert dense_model_of(run("sparse-gpt2", sparse=True), runs) == "gpt2"
    assert dense_model_of(run("thin", sparse=True), runs) is None


def test_another_sparse_model_is_not_a_dense_one() -> None:
    first, second = run("sparse-a", sparse=True), run("sparse-b", sparse=True)
    assert dense_run_of(first, [first, second]) is None


@pytest.mark.parametrize(
    "different",
    [{"task": "docstring"}, {"level": "edges"}, {"threshold": 0.5}, {"ranking": "signed"}, {"source": "zero"}],
)
def test_runs_whose_counts_cannot_be_compared_are_ignored(different: dict[str, Any]) -> None:
    sparse = run("sparse-gpt2", sparse=True)
    assert dense_run_of(sparse, [run("gpt2", **different), sparse]) is None


def test_in_a_grid_the_run_at_the_same_point_counts() -> None:
    dense = [run("gpt2", steps=steps) for steps in (1, 5)]
    sparse = [run("sparse-gpt2", sparse=True, steps=steps, n=8) for steps in (1, 5)]  # n is another for this model
    for i in range(2):
        assert dense_run_of(sparse[i], [*dense, *sparse]) is dense[i]


def test_two_runs_that_fit_equally_well_decide_nothing() -> None:
    sparse = run("sparse-gpt2", sparse=True)
    assert dense_run_of(sparse, [run("gpt2"), run("gpt2"), sparse]) is None
