"""The figure of gates kept shows the numbers of its curves: lines, bands, counts and multipliers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.measures.curves import Curve, multiplier
from gatelens.report.figures import kept_figure
from gatelens.report.figures._kept_caption import caption
from gatelens.report.figures._style import BLUE, GREEN, GREY, ORANGE, PINK

KEPT = [0.0, 10.0, 22.0, 60.0, 100.0]


def curve(effects: Sequence[float], level: str = "heads", kept: Sequence[float] = KEPT, **kwargs: Any) -> Curve:
    """A curve with these effects, exactly in the mean: prompts differ by a tenth to either side."""
    mean = torch.tensor(effects)[None, :, None]
    metrics = mean * torch.tensor([0.9, 1.1, 1.0, 1.0])
    none, everything = torch.zeros(1, 4), torch.ones(1, 4)
    return Curve(level, int(kept[-1]), [int(k) for k in kept], torch.tensor(kept), metrics, none, everything, **kwargs)


def dense(**kwargs: Any) -> Curve:
    return curve([0, 0.3, 0.92, 0.95, 1], **kwargs)  # reaches 0.9 with 22


def sparse(**kwargs: Any) -> Curve:
    return curve([0, 0.95, 0.97, 0.99, 1], **kwargs)  # reaches 0.9 with 10


def low(**kwargs: Any) -> Curve:
    return curve([0, 0.2, 0.4, 0.5, 0.6], **kwargs)


def lines(axis: Axes) -> dict[str, Any]:
    return {str(line.get_label()): line for line in axis.get_lines()}


def dashed(axis: Axes) -> list[tuple[list[float], list[float]]]:
    dashed = [line for line in axis.get_lines() if line.get_linestyle() == "--" and len(line.get_xdata()) == 2]
    return [(sorted(line.get_xdata()), list(line.get_ydata())) for line in dashed]


def legend(figure: Figure) -> list[str]:
    """The entries of the one legend, which is outside the panels."""
    assert all(axis.get_legend() is None for axis in figure.axes)
    [legend] = figure.subfigs[0].legends
    return [text.get_text() for text in legend.get_texts()]


def results(axis: Axes) -> list[str]:
    """What stands above a panel."""
    return [text.get_text() for text in axis.texts]


def test_lines_and_bands_are_those_of_the_curves() -> None:
    random = curve([0, 0.1, 0.2, 0.5, 1])
    drawn = dense(random=random)
    figure = kept_figure({"ioi": {"gpt2": drawn}})
    axis = figure.axes[0]
    line = lines(axis)["_gpt2"]
    assert list(line.get_xdata()) == KEPT
    assert list(line.get_ydata()) == drawn.effect.tolist() == pytest.approx([0, 0.3, 0.92, 0.95, 1])
    for shown, collection in zip((random, drawn), axis.collections, strict=True):
        band = collection.get_paths()[0].vertices.tolist()
        for x, bottom, top in zip(KEPT, shown.low.tolist(), shown.high.tolist(), strict=True):
            assert [x, bottom] in band
            assert [x, top] in band
    assert drawn.low[2] < 0.92 < drawn.high[2]  # the band has a width
    baseline = lines(axis)["_random gpt2"]
    assert list(baseline.get_ydata()) == random.effect.tolist()
    assert (baseline.get_color(), baseline.get_linestyle()) == (line.get_color(), ":")
    assert legend(figure) == ["gpt2", "random order"]


def test_the_legend_has_no_entry_for_what_is_not_drawn() -> None:
    assert legend(kept_figure({"ioi": {"gpt2": dense()}})) == ["gpt2"]
    # Circuits of random edges are on no path until nearly all are kept: one point is not a line.
    one_point = curve([0, 0, 0, 0, 1], "edges", [0.0, 0.0, 0.0, 0.0, 100.0])
    assert legend(kept_figure({"ioi": {"gpt2": dense(level="edges", random=one_point)}})) == ["gpt2"]


@pytest.mark.parametrize("level", ["heads", "edges"])
def test_nothing_is_clipped(level: str) -> None:
    """Neither bands nor baselines nor the ends of lines reach beyond the axes."""
    wild = curve([0, -0.7, 1.6, 1.3, 1], level, random=curve([0, -2.0, -1, 0.5, 1], level))
    axis = kept_figure({"ioi": {"a": wild}, "docstring": {"a": dense(level=level)}}).axes[0]
    (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
    x = [x for line in axis.get_lines() for x in line.get_xdata()]
    y = [y for band in axis.collections for y in band.get_paths()[0].vertices[:, 1]]
    assert left < min(x) <= max(x) < right
    assert bottom < min(y) <= -2.0 < 1.6 <= max(y) < top


def test_the_published_look() -> None:
    gpt2 = {"gpt2": dense(), "sparse-gpt2": sparse()}
    olmo = {"OLMo-7B": dense(), "sparse-OLMo-7B": sparse()}
    figure = kept_figure({"greater-than": gpt2, "ioi": gpt2, "docstring": olmo, "ioi-long": olmo})
    assert [axis.get_title() for axis in figure.axes] == ["Greater Than", "IOI", "Docstring", "IOI Long"]
    assert len({axis.get_position().y0 for axis in figure.axes}) == 1
    for axis, pair in zip(figure.axes, [(BLUE, ORANGE)] * 2 + [(GREEN, PINK)] * 2, strict=True):
        assert tuple(line.get_color() for line in axis.get_lines()[:2]) == pair
        assert list(axis.get_yticks()) == [0, 0.5, 1]
        assert axis.get_ylim() == figure.axes[0].get_ylim()
        # From one count to the other, and the multiplier above the panel.
        assert dashed(axis) == [([10.0, 22.0], [0.9, 0.9])]
        assert results(axis) == ["2.20x (1.00 to 10.0)\nno difference shown"]
        assert multiplier(dense(), sparse()).brief == "2.20x (1.00 to 10.0)"
    assert legend(figure) == ["gpt2", "sparse-gpt2", "OLMo-7B", "sparse-OLMo-7B"]
    assert {"Number of Heads Kept", "Explained Effect"} <= set(words(figure))
    assert faults(figure) == []


@pytest.mark.parametrize(("n", "models"), [(1, 1), (1, 9), (2, 3), (3, 5), (5, 2), (8, 3)])
def test_any_number_of_panels_and_models_without_overlapping_text(n: int, models: int) -> None:
    some = {f"a model with a name {i}": curve([0, 0.5, 0.8 + i / 50, 0.95, 1], random=low()) for i in range(models)}
    figure = kept_figure({f"task-{i}": some for i in range(n)})
    assert len(figure.axes) == n
    assert len({round(axis.get_position().y0, 3) for axis in figure.axes}) == (1 if n <= 4 else 2)
    assert [axis.get_title() for axis in figure.axes] == [f"Task {i}" for i in range(n)]
    assert faults(figure) == []
    assert legend(figure) == [*some, "random order"]


@pytest.mark.parametrize(
    ("level", "label"), [("edges", "Number of Edges Kept"), ("attention", "Number of Attention Edges Kept")]
)
def test_edges_have_a_log_scale(level: str, label: str) -> None:
    kept = [0.0, 1.0, 97.0, 9700.0, 32491.0]
    dense_curve = curve([0, 0.1, 0.3, 0.95, 1], level, kept)
    sparse_curve = curve([0, 0.2, 0.95, 0.97, 1], level, kept)
    figure = kept_figure({"ioi": {"gpt2": dense_curve, "sparse-gpt2": sparse_curve}})
    axis = figure.axes[0]
    assert axis.get_xscale() == "log"
    assert list(lines(axis)["_gpt2"].get_xdata()) == kept[1:]  # nothing kept has no place on a log scale
    assert dashed(axis) == [([97.0, 9700.0], [0.9, 0.9])]
    assert axis.texts[0].get_text().startswith("100.0x (")
    assert {label, "10⁰", "10⁴"} <= set(words(figure))
    assert faults(figure) == []


def test_a_curve_below_the_threshold_says_so() -> None:
    figure = kept_figure({"ioi": {"gpt2": dense(), "sparse-gpt2": low()}})
    assert results(figure.axes[0]) == ["sparse-gpt2 stays below 0.9"]
    assert dashed(figure.axes[0]) == []
    at_half = kept_figure({"ioi": {"gpt2": dense(), "sparse-gpt2": low()}}, threshold=0.5)
    assert dashed(at_half.axes[0]) == [([22.0, 60.0], [0.5, 0.5])]
    assert at_half.axes[0].texts[0].get_text().startswith("0.37x (")


def test_a_count_of_none_is_infinitely_fewer() -> None:
    nothing = curve([1, 1, 1, 1, 1])
    axis = kept_figure({"ioi": {"gpt2": dense(), "sparse-gpt2": nothing}}).axes[0]
    assert results(axis) == ["∞x (∞)\nno difference shown"]
    assert dashed(axis) == [([0.0, 22.0], [0.9, 0.9])]


def test_the_order_of_a_pair_is_dense_then_sparse() -> None:
    turned = {"sparse-gpt2": sparse(), "gpt2": dense()}
    assert kept_figure({"ioi": turned}).axes[0].texts[0].get_text().startswith("2.20x")
    others = {"a": sparse(), "b": dense()}
    assert kept_figure({"ioi": others}).axes[0].texts[0].get_text().startswith("0.45x")
    assert kept_figure({"ioi": others}, pairs=[("b", "a")]).axes[0].texts[0].get_text().startswith("2.20x")
    assert list(kept_figure({"ioi": others}, pairs=[]).axes[0].texts) == []


def test_a_difference_is_dark_and_none_is_grey() -> None:
    """The interval of the first pair contains 1. Of the second pair, every prompt needs 22 and 10 gates."""
    certain = [replace(curve, metrics=curve.effect[None, :, None].expand(1, 5, 4)) for curve in (dense(), sparse())]
    unclear, clear = kept_figure(
        {"ioi": {"a": dense(), "b": sparse()}, "docstring": dict(zip("ab", certain, strict=True))}
    ).axes
    assert results(unclear)[0].endswith("\nno difference shown")
    assert results(clear) == ["2.20x (2.20 to 2.20)"]
    for axis, colour in ((unclear, GREY), (clear, "0.15")):
        [line] = [line for line in axis.get_lines() if line.get_label() == "_counts"]
        assert axis.texts[0].get_color() == line.get_color() == colour


def test_several_pairs_in_a_panel_name_their_multipliers() -> None:
    four = {"gpt2": dense(), "sparse-gpt2": sparse(), "olmo": sparse(), "sparse-olmo": dense()}
    figure = kept_figure({"ioi": four})
    entries = [entry.replace("\n", " ").split(" (")[0] for entry in results(figure.axes[0])]
    assert entries == ["gpt2 / sparse-gpt2: 2.20x", "olmo / sparse-olmo: 0.45x"]
    assert dashed(figure.axes[0]) == [([10.0, 22.0], [0.9, 0.9])] * 2
    assert faults(figure) == []


def test_a_task_may_lack_a_model_and_a_model_keeps_its_colour() -> None:
    panels = {"ioi": {"gpt2": dense(), "sparse-gpt2": sparse()}, "docstring": {"sparse-gpt2": sparse()}, "math": {}}
    figure = kept_figure(panels)
    assert [len(axis.get_lines()) for axis in figure.axes] == [3, 1, 0]
    assert figure.axes[1].get_lines()[0].get_color() == lines(figure.axes[0])["_sparse-gpt2"].get_color() == ORANGE
    assert "no curve" in words(figure)


def test_overshoot_is_in_sight() -> None:
    over = curve([0, 0.5, 1.6, 1.3, 1])
    assert kept_figure({"ioi": {"gpt2": over}}).axes[0].get_ylim()[1] > 1.6
    below = curve([0, -0.4, 0.5, 0.9, 1])
    assert kept_figure({"ioi": {"gpt2": below}}).axes[0].get_ylim()[0] < -0.4


def test_long_names_do_not_overlap() -> None:
    names = ["HuggingFaceTB/SmolLM2-135M-Instruct", "sparse-HuggingFaceTB/SmolLM2-135M-Instruct"]
    panels = {f"task-{i}": {names[0]: dense(), names[1]: low(random=low())} for i in range(4)}
    assert faults(kept_figure(panels)) == []


def test_the_figure_says_how_gates_were_ranked_and_left_out() -> None:
    remark = next(text for text in words(kept_figure({"ioi": {"a": dense()}})) if "Ranked" in text)
    assert "absolute score" in remark
    assert "corrupt value" in remark
    both = {"a": dense(), "b": sparse(ranking="signed", source="zero")}
    remark = next(text for text in words(kept_figure({"ioi": both})) if "Ranked" in text).replace("\n", " ")
    assert "absolute score on the same prompts, everything else is set to its corrupt value (a)" in remark
    assert "signed score on the same prompts, everything else is set to zero (b)" in remark
    remark = next(text for text in words(kept_figure({"ioi": {"a": dense(ranked_on=9)}})) if "Ranked" in text)
    assert "absolute score on 9 other prompts" in remark.replace("\n", " ")
    assert "mean of 4 held-out prompts. Bands: 95 %, bootstrap over prompts" in remark.replace("\n", " ")
    more = replace(dense(), metrics=torch.ones(2, 5, 7), none=torch.zeros(2, 7), everything=torch.ones(2, 7))
    text = caption({"ioi": {"a": dense()}, "docstring": {"a": more}}, 0.9, compares=False)
    assert "mean of 4 prompts (IOI); 2 seeds of 7 prompts (Docstring)" in text
    assert "bootstrap over prompts and seeds" in text


def test_a_curve_of_circuits_that_carry_nothing_is_drawn_empty() -> None:
    # Edges on no path are not counted: all points may keep 0 edges, which a log scale has no place for.
    empty = Curve("edges", 10, [0, 1], torch.zeros(2), torch.zeros(1, 2, 4), torch.zeros(1, 4), torch.ones(1, 4))
    assert list(lines(kept_figure({"ioi": {"a": empty}}).axes[0])["_a"].get_xdata()) == []


def test_one_figure_has_one_level() -> None:
    with pytest.raises(GatelensError, match="edges and heads"):
        kept_figure({"ioi": {"a": dense(), "b": dense(level="edges")}})
    with pytest.raises(GatelensError, match="there is no curve"):
        kept_figure({})
