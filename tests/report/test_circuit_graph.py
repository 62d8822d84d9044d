"""The drawing of a circuit: which components and edges, how wide, in which colour, and where edges enter."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from families import tiny
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from text_boxes import faults, words
from toys import random_task

from gatelens import CircuitSettings, find_circuit, load_circuit, write_report
from gatelens.errors import GatelensError
from gatelens.model.graph import Graph
from gatelens.report.figures import circuit_figure, role_circuit_figure
from gatelens.report.figures._circuit_graph import chosen_edges
from gatelens.report.figures._style import BLUE, RED

PLAIN, SHARED = Graph(2, 2, 2), Graph(3, 4, 2)


def scores_of(graph: Graph, named: dict[str, float]) -> torch.Tensor:
    scores = torch.zeros(graph.n_sources, graph.n_destinations)
    for name, score in named.items():
        scores[graph.edge(name)] = score
    return scores


def random_scores(graph: Graph) -> torch.Tensor:
    """As in real circuits, a few components have most of the strong edges."""
    generator = torch.Generator().manual_seed(0)
    sources = torch.randn(graph.n_sources, 1, generator=generator).exp()
    destinations = torch.randn(graph.n_destinations, generator=generator).exp()
    return sources * destinations * torch.randn(graph.edges.shape, generator=generator) * graph.edges


def drawn_edges(figure: Figure) -> PathCollection:
    """The collection of curves; the other one holds the points where they end."""
    return next(
        paths
        for paths in figure.axes[0].collections
        if isinstance(paths, PathCollection) and len(paths.get_paths()) > 1
    )


def boxes(figure: Figure) -> dict[str, FancyBboxPatch]:
    patches = [patch for patch in figure.axes[0].patches if isinstance(patch, FancyBboxPatch)]
    return {patch.get_gid().removeprefix("component-"): patch for patch in patches}


def test_edges_have_width_by_score_colour_by_sign_and_a_line_for_q_k_and_v() -> None:
    named = {"embed -> L0H0.q": 1.0, "embed -> L0H0.k": -2.0, "embed -> L0H0.v": 3.0, "L0H0 -> logits": -4.0}
    scores = scores_of(PLAIN, named)
    figure = circuit_figure(PLAIN, scores, scores != 0, "a $title$")
    edges = drawn_edges(figure)
    # The strongest is drawn last, in front.
    assert [to_hex(colour).upper() for colour in edges.get_edgecolors()] == [BLUE, RED, BLUE, RED]
    widths = edges.get_linewidths()
    steps = [b - a for a, b in pairwise(widths)]
    assert steps == pytest.approx([steps[0]] * 3)
    assert steps[0] > 0
    dashes = [pattern for _, pattern in edges.get_linestyles()]
    assert (dashes[0], dashes[3]) == (None, None)  # q and logits: solid
    assert dashes[1] is not None
    assert dashes[2] is not None
    assert dashes[1] != dashes[2]
    # q enters at the left of the head's lower side, k in the middle, v at the right; they leave on top.
    head, ends = boxes(figure)["L0H0"], [path.vertices for path in edges.get_paths()]
    left, middle = head.get_x(), head.get_x() + head.get_width() / 2
    xs = [float(vertices[-1][0]) for vertices in ends[:3]]
    assert left < xs[0] < xs[1] < xs[2] < left + head.get_width()
    assert xs[1] == pytest.approx(middle)
    assert [float(vertices[-1][1]) for vertices in ends[:3]] == pytest.approx([head.get_y()] * 3)
    assert ends[3][0].tolist() == pytest.approx([middle, head.get_y() + head.get_height()])
    assert {"a $title$", "embed", "L0H0", "logits", "helps", "hinders", "into k"} <= set(words(figure))
    assert faults(figure) == []


def test_only_components_with_a_kept_edge_are_drawn() -> None:
    scores = random_scores(SHARED)
    kept = scores_of(SHARED, {"embed -> L1KV1.k": 1, "L1H3 -> M2": 1, "M2 -> logits": 1}) != 0
    figure = circuit_figure(SHARED, scores, kept)
    assert set(boxes(figure)) == {"embed", "L1KV1", "L1H3", "M2", "logits"}
    assert len(drawn_edges(figure).get_paths()) == 3
    # KV head 1 serves heads 2 and 3: a line joins it to the one that is drawn.
    assert len(figure.axes[0].get_lines()) == 1
    remark = next(text for text in words(figure) if "edges" in text).replace("\n", " ")
    assert f"3 of {SHARED.n_edges} edges, 3 of them on a path" in remark
    assert {"1", "2"} <= set(words(figure))  # the layers
    assert "0" not in words(figure)


def test_a_number_keeps_the_best_by_the_ranking() -> None:
    named = {"embed -> L0H0.q": 1.0, "embed -> M0": -2.0, "M0 -> logits": 3.0, "embed -> logits": -4.0}
    scores = scores_of(PLAIN, named)
    assert chosen_edges(PLAIN, scores, 2) == [PLAIN.edge("embed -> logits"), PLAIN.edge("M0 -> logits")]
    assert set(chosen_edges(PLAIN, scores, 2, "signed")) == {PLAIN.edge("M0 -> logits"), PLAIN.edge("embed -> L0H0.q")}
    assert len(chosen_edges(PLAIN, scores, 10**6)) == PLAIN.n_edges  # more than there are: all


@pytest.mark.parametrize(("graph", "n"), [(Graph(12, 12, 12), 30), (Graph(12, 12, 12), 200), (Graph(30, 9, 3), 200)])
def test_names_do_not_overlap_and_boxes_stand_apart(graph: Graph, n: int) -> None:
    figure = circuit_figure(graph, random_scores(graph), n, "IOI", "signed")
    assert any("by signed score" in text.replace("\n", " ") for text in words(figure))
    assert len(drawn_edges(figure).get_paths()) == n
    assert faults(figure) == []
    placed = [patch.get_bbox() for patch in boxes(figure).values()]
    assert sum(a.overlaps(b) for i, a in enumerate(placed) for b in placed[:i]) == 0
    # Each name fits into its box.
    for text in figure.axes[0].texts:
        if text.get_text() in boxes(figure):
            assert text.get_window_extent().width <= boxes(figure)[text.get_text()].get_window_extent().width


def test_what_cannot_be_drawn_is_said() -> None:
    with pytest.raises(GatelensError, match="the circuit has no edge"):
        circuit_figure(PLAIN, random_scores(PLAIN), 0)
    with pytest.raises(GatelensError, match="scores of the same model"):
        circuit_figure(PLAIN, random_scores(SHARED), 5)


class TestCircuitsByRole:
    ROLES = ("first token", "S1", "last token")
    SEES = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 1]]).bool()

    def circuit(self, graph: Graph, named: dict[tuple[int, str], float]) -> torch.Tensor:
        scores = torch.zeros(3, graph.n_sources, graph.n_destinations)
        for (role, name), score in named.items():
            scores[(role, *graph.edge(name))] = score
        return scores

    def test_components_stand_in_the_column_of_their_role(self) -> None:
        named = {(1, "embed -> L0H1.v"): 1.0, (2, "L0H1 -> M1"): -2.0, (2, "M1 -> logits"): 3.0}
        scores = self.circuit(PLAIN, named)
        figure = role_circuit_figure(PLAIN, self.ROLES, self.SEES, scores, scores != 0, "by role")
        places = {name: patch.get_bbox().x0 for name, patch in boxes(figure).items()}
        assert set(places) == {
            "embed at S1", "L0H1 at S1", "L0H1 at last token", "M1 at last token", "logits at last token",
        }  # fmt: skip
        left, right = ({x for name, x in places.items() if name.endswith(role)} for role in self.ROLES[1:])
        assert max(left) < min(right)
        assert [to_hex(colour).upper() for colour in drawn_edges(figure).get_edgecolors()] == [BLUE, RED, BLUE]
        grey = [line for line in figure.axes[0].lines if to_hex(line.get_color()) == to_hex("0.6")]
        assert len(grey) == 1  # attention moves what L0H1 read at S1 to the last token
        assert {"S1", "last token"} <= set(words(figure))
        assert not faults(figure)

    def test_what_is_not_visible_is_not_connected(self) -> None:
        """A head reads v at the last token and writes at S1, which comes before it: no grey line."""
        named = {(2, "embed -> L0KV1.v"): 1.0, (1, "L0H3 -> L1KV0.k"): 1.0, (2, "L1H0 -> logits"): 1.0}
        scores = self.circuit(SHARED, named)
        figure = role_circuit_figure(SHARED, self.ROLES, self.SEES, scores, scores != 0)
        grey = [line for line in figure.axes[0].lines if to_hex(line.get_color()) == to_hex("0.6")]
        assert len(grey) == 1  # from L1KV0 at S1 to L1H0 at the last token
        assert "0 of them on a path" in " ".join(words(figure)).replace("\n", " ")

    def test_an_empty_circuit(self) -> None:
        scores = self.circuit(PLAIN, {})
        with pytest.raises(GatelensError, match="the circuit has no edge"):
            role_circuit_figure(PLAIN, self.ROLES, self.SEES, scores, scores != 0)

    def test_a_report_draws_and_tabulates_it(self, tmp_path: Path) -> None:
        settings = CircuitSettings(
            level="edges-by-role", method="eap", points=4, random_points=0, sample=0, describe=0, allow_noise=True
        )
        task = random_task(n=3, lengths=(5,))
        find_circuit(tiny("llama", num_hidden_layers=2), task, settings, out=tmp_path / "run")
        report = write_report([tmp_path / "run"], tmp_path / "report")
        assert not report.problems
        [table] = (tmp_path / "report").rglob("*circuit-by-role*.csv")
        header, *lines = csv.reader(table.open(encoding="utf-8"))
        assert header == ["role", "source", "destination", "score", "on_a_path"]
        best = load_circuit(tmp_path / "run", scores=True).scores[0].top(1)[0]
        assert f"{lines[0][1]} -> {lines[0][2]} at {lines[0][0]}" == best.name
        assert float(lines[0][3]) == pytest.approx(best.score, rel=1e-4)
