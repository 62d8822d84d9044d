"""The drawing of a circuit: which components and edges, how wide, in which colour, and where edges enter."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.model.graph import Graph
from gatelens.report.figures import circuit_figure
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
