"""Attention maps: tokens are data, weights and open edges stand where they should."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.report.figures import attention_maps

TOKENS = ["<s>", " $x$", "\n", "<script>", "\x00"]


def weights(seed: int = 0) -> torch.Tensor:
    return torch.rand(5, 5, generator=torch.Generator().manual_seed(seed))


def test_heads_are_rows_and_models_columns() -> None:
    maps = {name: {"dense": weights(1), "sparse": weights(2)} for name in ("L1H2", "L3H0", "L4H4")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = attention_maps(TOKENS, maps, title="a prompt")
        shown = words(figure)
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels][:3] == ["L1H2, dense", "L1H2, sparse", "L3H0, dense"]
    drawn = panels[1].images[0].get_array()
    lower = np.tril(np.ones((5, 5), dtype=bool))
    assert np.array_equal(drawn.data[lower], weights(2).numpy()[lower])
    assert np.array_equal(drawn.mask, ~lower)  # keys after the query
    # Each token labels the rows of the first column and the columns of the last row.
    for label in ("<s>", "␣$x$", "↵", "<script>", "\\x00"):
        assert shown.count(label) == 3 + 2
    tick = panels[4].get_xticklabels()[1]
    assert (tick.get_text(), tick.get_parse_math()) == ("␣$x$", False)
    assert faults(figure) == []


def test_open_edges_are_marked() -> None:
    opened = torch.zeros(5, 5, dtype=torch.bool)
    opened[3, 1] = opened[4, 0] = True
    maps = {"L1H2": {"dense": weights(), "sparse": weights()}}
    figure = attention_maps(TOKENS, maps, {"L1H2": {"sparse": opened}})
    dense, sparse = (axis for axis in figure.axes if axis.get_title())
    assert len(dense.collections) == 0
    # x is the key, y the query.
    assert sorted(map(tuple, sparse.collections[0].get_offsets().tolist())) == [(0.0, 4.0), (1.0, 3.0)]
    assert any("gate is open" in text for text in words(figure))
    assert faults(figure) == []


def test_a_head_may_lack_a_model_and_long_prompts_have_fewer_labels() -> None:
    figure = attention_maps(TOKENS, {"L0H0": {"dense": weights()}, "L0H1": {"sparse": weights()}})
    assert words(figure).count("not given") == 2
    long = attention_maps([f" {i}" for i in range(130)], {"L0H0": {"dense": torch.rand(130, 130)}})
    axis = long.axes[0]
    assert [label.get_text() for label in axis.get_xticklabels()[:3]] == ["␣0", "␣3", "␣6"]
    assert list(axis.get_xticks()[:3]) == [0, 3, 6]
    assert faults(long) == []


def test_maps_of_another_size_are_refused() -> None:
    with pytest.raises(GatelensError, match=r"L1H2 in dense has the shape \(5, 5\), and the prompt has 4 tokens"):
        attention_maps(TOKENS[:4], {"L1H2": {"dense": weights()}})
    with pytest.raises(GatelensError, match="at least one head"):
        attention_maps(TOKENS, {})
