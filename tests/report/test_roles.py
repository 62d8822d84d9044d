"""Figures of head roles have the panels, lines and texts that they should: structure, not pixels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.measures.ablation import AblationCurve
from gatelens.report.figures import STYLES, ablation_figure, head_maps


def curves(shift: float = 0.0) -> list[AblationCurve]:
    changes = torch.tensor([[0.0, -1.0, -2.0], [0.0, -3.0, -4.0]])
    return [AblationCurve(kind, torch.tensor([0, 25, 50]), changes + shift, torch.tensor([50, 90])) for kind in STYLES]


@pytest.mark.parametrize(("n_tasks", "n_models"), [(1, 1), (3, 4)])
def test_the_ablation_figure_is_a_grid_of_tasks_and_models(n_tasks: int, n_models: int) -> None:
    grid = {f"task-{t}": {f"model {m}": curves(t + m) for m in range(n_models)} for t in range(n_tasks)}
    figure = ablation_figure(grid)
    assert len(figure.axes) == n_tasks * n_models
    # Columns are named on top, rows at the right of the last column.
    assert [axis.get_title() for axis in figure.axes[:n_models]] == [f"model {m}" for m in range(n_models)]
    last = figure.axes[n_models - 1 :: n_models]
    assert [[text.get_text() for text in axis.texts] for axis in last] == [[f"Task {t}"] for t in range(n_tasks)]
    assert all(axis.texts[0].xy[0] > 1 for axis in last)
    # One y scale along a row, and x from 0 to the last number of heads.
    assert len({axis.get_ylim() for axis in figure.axes[:n_models]}) == 1
    assert {axis.get_xlim() for axis in figure.axes} == {(0, 50)}
    assert {"Number of Ablated Heads", *STYLES} <= set(words(figure))
    assert faults(figure) == []


def test_a_dot_shows_what_just_the_heads_of_a_kind_do_where_they_run_out() -> None:
    own = torch.tensor([1.0, 2.0])
    few = [replace(curve, heads=torch.tensor([10, 90]), own=own) for curve in curves()]
    lines = {line.get_label(): line for line in ablation_figure({"syntax": {"model": few}}).axes[0].get_lines()}
    dot = lines["_own interference"]
    assert (list(dot.get_xdata()), list(dot.get_ydata())) == ([30.0], [1.5])  # of the 90 only 50 are ablated
    assert "_own random" not in lines
    unknown = [replace(curve, heads=torch.tensor([10, 90])) for curve in curves()]  # of an earlier version
    for drawn, explained in ((few, True), (unknown, False)):
        texts = words(ablation_figure({"a": {"b": drawn}}))
        assert any("dot: only the heads of this kind" in text for text in texts) is explained
    enough = [replace(curve, own=own) for curve in curves()]
    axis = ablation_figure({"syntax": {"model": enough}}).axes[0]
    assert not [line for line in axis.get_lines() if line.get_label().startswith("_own")]


def test_long_names_do_not_overlap() -> None:
    names = ["HuggingFaceTB/SmolLM2-135M-Instruct", "sparse-HuggingFaceTB/SmolLM2-135M-Instruct"]
    tasks = ["ioi", "an-own-task-with-a-very-long-name-indeed"]
    assert faults(ablation_figure({task: {name: curves() for name in names} for task in tasks})) == []
    assert faults(head_maps({name: torch.rand(5, 4) for name in names})) == []
    assert faults(head_maps({"gates": torch.rand(5, 4)}, f"keep {tasks[1]} (ask=examples), in {names[0]}")) == []


def test_ablation_lines_and_bands_are_those_of_the_curves() -> None:
    drawn = curves()
    axis = ablation_figure({"syntax": {"model": drawn}}).axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    for curve in drawn:
        assert list(lines[curve.kind].get_xdata()) == [0, 25, 50]
        assert list(lines[curve.kind].get_ydata()) == curve.change.tolist() == [0.0, -2.0, -3.0]
    assert len(axis.collections) == 3  # the random order is a thin line without a band
    assert lines["random"].get_linewidth() < lines["facilitation"].get_linewidth()
    band = axis.collections[0].get_paths()[0].vertices.tolist()
    assert [50, -4.0] in band
    assert [50, -2.0] in band
    assert len({(line.get_color(), line.get_linestyle()) for line in lines.values() if line.get_label() in STYLES}) == 4


def test_a_line_is_thin_past_the_heads_of_its_kind() -> None:
    full = curves()
    few = [replace(curve, heads=torch.tensor([49, 90])) if curve.kind == "interference" else curve for curve in full]
    axis = ablation_figure({"syntax": {"model": few}}).axes[0]
    lines = {line.get_label(): line for line in axis.get_lines()}
    thick, thin = lines["interference"], lines["_past interference"]
    assert (list(thick.get_xdata()), list(thin.get_xdata())) == ([0, 25], [25, 50])
    assert (list(thick.get_ydata()), list(thin.get_ydata())) == ([0.0, -2.0], [-2.0, -3.0])
    assert thin.get_linewidth() < thick.get_linewidth()
    assert list(lines["facilitation"].get_xdata()) == [0, 25, 50]
    explanation = "thin: also heads of other kinds"
    assert explanation in "".join(words(axis.figure))
    assert explanation not in "".join(words(ablation_figure({"syntax": {"model": full}})))


def test_a_task_may_lack_a_model() -> None:
    figure = ablation_figure({"syntax": {"a": curves()}, "math": {"b": curves(3)}})
    assert len(figure.axes) == 4
    assert [axis.get_title() for axis in figure.axes[:2]] == ["a", "b"]
    assert words(figure).count("no result") == 2
    assert [len(axis.get_lines()) for axis in figure.axes] == [5, 1, 1, 5]
    with pytest.raises(GatelensError, match="at least one task"):
        ablation_figure({})


@pytest.mark.parametrize("n", [1, 3, 5])
def test_head_maps_show_each_score(n: int) -> None:
    maps = {f"kind {i}": torch.rand(5, 4) for i in range(n)}
    figure = head_maps(maps, "induction in stories260k", label="share")
    shown = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in shown] == list(maps)
    for axis, scores in zip(shown, maps.values(), strict=True):
        image = axis.images[0]
        assert torch.equal(torch.tensor(image.get_array()), scores)
        assert (image.get_clim(), image.get_cmap().name) == ((0, 1), "viridis")
        assert axis.get_ylim()[0] < axis.get_ylim()[1]  # layer 0 at the bottom
    assert {"induction in stories260k", "share", "head", "layer"} <= set(words(figure))
    assert faults(figure) == []


def test_signed_scores_have_a_scale_symmetric_about_0() -> None:
    maps = {"dense": torch.tensor([[0.5, -3.0]]), "sparse": torch.tensor([[2.0, float("nan")]])}
    images = [axis.images[0] for axis in head_maps(maps).axes if axis.images]
    assert {image.get_clim() for image in images} == {(-3, 3)}
    colours = images[0].get_cmap()
    red, _, blue, _ = colours(0.05)
    assert red > blue  # below 0
    red, _, blue, _ = colours(0.95)
    assert blue > red
    assert len(set(colours(float("nan"))[:3])) == 1  # not measured: grey
    with pytest.raises(GatelensError, match="layer, head"):
        head_maps({"dense": torch.rand(3)})
