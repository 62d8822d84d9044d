"""Names of components: what is written is read back, and other text is not taken for a name."""

from __future__ import annotations

import pytest

from gatelens import GatelensError, Head
from gatelens.model.components import Component
from gatelens.model.graph import Graph


def test_heads_are_written_and_sorted_by_layer() -> None:
    assert str(Head(3, 7)) == "L3H7"
    assert sorted([Head(1, 0), Head(0, 3), Head(0, 2)]) == [Head(0, 2), Head(0, 3), Head(1, 0)]


@pytest.mark.parametrize("head", [Head(0, 0), Head(3, 7), Head(31, 12)])
def test_a_head_is_read_back(head: Head) -> None:
    assert Head.parse(str(head)) == head


@pytest.mark.parametrize(
    "name", ["", "L3", "H7", "L3H", "LH7", "3H7", "l3h7", "L3H7.q", " L3H7", "L-1H0", "L3KV2", "M3"]
)
def test_other_text_is_not_a_head(name: str) -> None:
    with pytest.raises(GatelensError, match=f"'{name}' is not the name of a head: write layer 3, head 7 as L3H7"):
        Head.parse(name)


@pytest.mark.parametrize(
    ("name", "component"),
    [("L3H7", Component(3, "H", 7)), ("L12KV0", Component(12, "KV", 0)), ("M10", Component(10, "M"))],
)
def test_a_component_is_read_and_written(name: str, component: Component) -> None:
    assert Component.find(name) == component
    assert str(component) == name


@pytest.mark.parametrize("name", ["embed", "logits", "", "L3H7.q", "M3.q", "L3M7", "L٣H7"])
def test_other_names_are_not_in_a_layer(name: str) -> None:
    assert Component.find(name) is None


def test_every_name_of_a_graph_but_the_ends_is_in_a_layer() -> None:
    graph = Graph(2, 4, 2)
    names = {name.partition(".")[0] for name in graph.source_names + graph.destination_names}
    assert {name for name in names if Component.find(name) is None} == {"embed", "logits"}
