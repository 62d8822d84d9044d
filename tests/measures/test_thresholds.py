"""Multipliers at several thresholds: counts worked out by hand, and a figure that shows every one of them."""

from __future__ import annotations

import pytest
import torch

from gatelens import GatelensError
from gatelens.measures.circuit_result import CircuitResult
from gatelens.measures.circuit_settings import CircuitSettings
from gatelens.measures.curves import Curve
from gatelens.measures.thresholds import THRESHOLDS, ThresholdLine, threshold_lines
from gatelens.measures.validity import Validity
from gatelens.report.figures import thresholds_figure

VALIDITY = Validity(correlation=None, sampled=0, kept=0.0, effect=0.0, complement=0.0, overlap=None)


def run(model: str, counts: list[int], *, sparse: bool = False, end: float = 1.0, task: str = "ioi") -> CircuitResult:
    """A circuit that reaches 0.55, 0.75 and ``end`` of the effect with these numbers of heads, of 40."""
    effects = torch.tensor([0.0, 0.55, 0.75, end])
    metrics = effects[None, :, None].expand(1, 4, 5)
    ends = torch.zeros(1, 5), torch.ones(1, 5)
    kept = torch.tensor([0.0, *map(float, counts)])
    curve = Curve("heads", 40, [0, *counts], kept, metrics, *ends, fingerprints=("prompts",))
    settings = CircuitSettings(level="heads", method="eap", n=5)
    return CircuitResult(model, task, settings, [], curve, VALIDITY, 1.0, sparse, "dense" if sparse else None, None)


def test_counts_by_hand() -> None:
    """At 0.5 the models need 8 and 2 heads, at 0.6 and 0.7 they need 12 and 4, and above that 40 and 10."""
    lines = threshold_lines([run("dense", [8, 12, 40]), run("sparse", [2, 4, 10], sparse=True)])
    assert [line.threshold for line in lines] == list(THRESHOLDS)
    assert [line.multiplier for line in lines] == [4, 3, 3, 4, 4]
    assert [line.dense_count for line in lines[:2]] == ["8 (1 to 8; 5 prompts)", "12 (9 to 12; 5 prompts)"]
    assert [line.refined for line in lines] == [False, False, False, False, True]
    assert {line.paired for line in lines} == {True}


def test_a_coarse_grid_widens_the_interval() -> None:
    """At 0.6 the dense model needs 9 to 12 heads and the sparse one 3 or 4; at 0.9 the curves count as refined."""
    lines = threshold_lines([run("dense", [8, 12, 40]), run("sparse", [2, 4, 10], sparse=True)])
    assert [line.shown for line in lines[:2]] == [
        "4.00x (0.50 to 8.00; 5 prompts), no difference shown",
        "3.00x (2.25 to 4.00; 5 prompts)",
    ]
    assert lines[-1].shown == "4.00x (4.00 to 4.00; 5 prompts)"


def test_a_threshold_that_one_model_does_not_reach_has_no_multiplier() -> None:
    lines = threshold_lines([run("dense", [8, 12, 40]), run("sparse", [2, 4, 10], sparse=True, end=0.76)])
    assert [line.multiplier for line in lines] == [4, 3, 3, None, None]
    assert lines[-1].sparse_count.startswith("not reached")
    assert lines[-1].shown == "-"


def test_a_circuit_without_a_dense_one_is_left_out() -> None:
    assert threshold_lines([run("other", [1, 2, 3]), run("sparse", [2, 4, 10], sparse=True)]) == []


def line(
    threshold: float, low: float | None, ratio: float | None, high: float | None, task: str = "a"
) -> ThresholdLine:
    return ThresholdLine(
        level="heads", method="eap", task=task, dense="d", sparse="s", threshold=threshold, refined=False,
        dense_count="", sparse_count="", multiplier=ratio, multiplier_low=low, multiplier_high=high,
        shows_difference=low is not None and low > 1,
    )  # fmt: skip


class TestFigure:
    def test_a_bar_for_each_multiplier(self) -> None:
        """The first interval excludes 1, the second contains it, the third has no upper end; the fourth is missing."""
        lines = [line(0.5, 1.5, 2.0, 3.0), line(0.7, 0.5, 1.25, 4.0), line(0.9, 1.5, 6.0, None)]
        figure = thresholds_figure([*lines, line(0.5, None, None, None, "b")])
        first, second = figure.subfigs[0].axes
        dots = [drawn for drawn in first.lines if drawn.get_marker() == "o"]
        assert [tuple(float(x[0]) for x in dot.get_data()) for dot in dots] == [(0.5, 2.0), (0.7, 1.25), (0.9, 6.0)]
        assert dots[0].get_color() == dots[2].get_color() != dots[1].get_color()
        assert sum(drawn.get_marker() == "^" for drawn in first.lines) == 1
        assert not [drawn for drawn in second.lines if drawn.get_marker() == "o"]
        figure.draw_without_rendering()

    def test_the_axis_contains_all_bars(self) -> None:
        axis = thresholds_figure([line(0.5, 0.01, 20.0, 300.0)]).subfigs[0].axes[0]
        low, high = axis.get_ylim()
        assert low < 0.01
        assert high > 300

    def test_one_level_at_a_time(self) -> None:
        with pytest.raises(GatelensError, match="lines of one level"):
            thresholds_figure([line(0.5, 1, 2, 3), line(0.5, 1, 2, 3).replace(level="edges")])
