"""Methods side by side: ranks worked out by hand, costs from prices, and lines that say what the results say."""

from __future__ import annotations

from pathlib import Path

import pytest
from toys import planted, planted_task

from gatelens import CircuitSettings, GatelensError, find_circuit
from gatelens.measures.circuit_result import CircuitResult, load_circuit
from gatelens.measures.method_comparison import MethodLine, method_lines, method_ranks
from gatelens.report.figures import methods_figure

pytestmark = pytest.mark.filterwarnings("ignore::gatelens.errors.GatelensWarning")


def line(method: str, task: str, count: int | None, model: str = "small", level: str = "heads") -> MethodLine:
    return MethodLine(
        level=level, task=task, model=model, method=method, count=count, threshold=0.9, total=100, cost=3.0, needed="",
        count_low=None if count is None else count - 1, count_high=None, prompts=8,
    )  # fmt: skip


class TestRanks:
    def test_by_hand(self) -> None:
        """On the first task a needs fewest; on the second a and b need the same, and c does not reach the threshold."""
        lines = [line("a", "x", 5), line("b", "x", 7), line("c", "x", 9)]
        lines += [line("a", "y", 20), line("b", "y", 20), line("c", "y", None)]
        ranks = {rank.method: (rank.rank, rank.best, rank.cells) for rank in method_ranks(lines)}
        assert ranks == {"a": (1.25, 2, 2), "b": (1.75, 1, 2), "c": (3.0, 0, 2)}
        assert list(ranks) == ["a", "b", "c"]

    def test_tasks_without_all_methods_are_left_out(self) -> None:
        lines = [line("a", "x", 5), line("b", "x", 4), line("a", "y", 1)]
        assert [(rank.method, rank.rank, rank.cells) for rank in method_ranks(lines)] == [("b", 1, 1), ("a", 2, 1)]
        assert method_ranks([line("a", "x", 5), line("b", "y", 4)]) == []

    def test_nothing_reached_is_not_best(self) -> None:
        assert [rank.best for rank in method_ranks([line("a", "x", None), line("b", "x", None)])] == [0, 0]

    def test_each_ranking_is_compared_alone(self) -> None:
        """By the first ranking a needs fewer than b, by the second more. Of two runs of a, the better one counts."""
        by_mean = [line("a", "x", 5), line("a", "x", 9).replace(options="steps=1"), line("b", "x", 7)]
        signed = [line(method, "x", count).replace(ranking="signed") for method, count in (("a", 8), ("b", 6))]
        ranks = {rank.method: (rank.rank, rank.best, rank.cells) for rank in method_ranks([*by_mean, *signed])}
        assert ranks == {"a": (1.5, 1, 2), "b": (1.5, 1, 2)}
        assert [rank.rank for rank in method_ranks(by_mean)] == [1, 2]


def results(tmp_path: Path, *methods: str) -> list[CircuitResult]:
    found = []
    for method in methods:
        settings = CircuitSettings(method=method, steps=4, random_points=2, sample=8, describe=0)
        find_circuit(planted(), planted_task(n=4), settings, out=tmp_path / method)
        found.append(load_circuit(tmp_path / method))
    return found


def test_lines_of_saved_circuits(tmp_path: Path) -> None:
    """The planted model has 2 heads in its circuit, of 8, and both methods find them."""
    lines = method_lines(results(tmp_path, "eap-ig", "patching"))
    assert [(one.method, one.count, one.total, one.prompts) for one in lines] == [
        ("eap-ig", 2, 8, 4),
        ("patching", 2, 8, 4),
    ]
    ig, exact = lines
    assert ig.cost == 2 + 2 * 4  # two captures and four forward-backward passes for each prompt
    assert exact.cost == 8 * 0.5  # half a forward for each head
    assert ig.needed.startswith("2 (")
    assert ig.needed.endswith("4 prompts)")
    assert ig.cpr is not None
    assert ig.cmd is not None


def test_one_method_is_not_compared(tmp_path: Path) -> None:
    assert method_lines(results(tmp_path, "eap")) == []


class TestFigure:
    def test_panels_and_order(self) -> None:
        lines = [line("worse", "x", 50), line("better", "x", 5), line("worse", "y", None), line("better", "y", 8)]
        lines += [line("worse", "x", 60, "sparse"), line("better", "x", 3, "sparse")]
        figure = methods_figure(lines)
        axes = figure.subfigs[0].axes
        assert len(axes) == 2
        assert [label.get_text() for label in axes[0].get_yticklabels()] == ["better", "worse"]
        dots = [(x, y) for drawn in axes[0].lines for x, y in [drawn.get_data()] if drawn.get_marker() == "o"]
        assert sorted(float(x[0]) for x, _ in dots) == [3, 5, 50, 60]
        crosses = [drawn for drawn in axes[1].lines if drawn.get_marker() == "x"]
        assert len(crosses) == 1
        figure.draw_without_rendering()

    def test_one_level_at_a_time(self) -> None:
        with pytest.raises(GatelensError, match="lines of one level"):
            methods_figure([line("a", "x", 1), line("a", "x", 1, level="edges")])
