"""The toy of two-digit addition: what it measures, that it runs, and the pattern that a whole run of it found.

A whole run takes two minutes. `examples/addition_toy.json` is what one wrote; it is held to the settings of today.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module")
def toy() -> Any:
    spec = importlib.util.spec_from_file_location("addition_toy", EXAMPLES / "addition_toy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found() -> Any:
    return json.loads((EXAMPLES / "addition_toy.json").read_text())


@pytest.mark.parametrize("base", [4, 10])
def test_sums_are_right(toy: Any, base: int) -> None:
    texts = toy.sums(base)
    assert len(set(texts)) == base**4
    for text in texts:
        assert len(text) == len(toy.MARKS) - 1
        assert int(text[1:3], base) + int(text[4:6], base) == int(text[7:10], base)


def test_what_is_measured(toy: Any) -> None:
    """Edges by hand: =, x and y are positions 6, 7 and 8; a, b, c and d are 1, 2, 4 and 5."""
    opened = torch.zeros(2, 11, 11)
    opened[0, 6, [1, 4]] = 1.0  # x from a and c,
    opened[0, 8, 5] = 1.0  # z from d,
    opened[0, 8, 1] = 0.5  # and from a, which is not of its place
    opened[0, 5, 2] = 1.0  # no digit of the sum is written at d
    opened[1, 7, 5] = 0.25
    assert toy.same_place(opened) == pytest.approx(3 / 3.5)
    assert toy.open_share(opened) == pytest.approx(4.75 / 132)
    assert toy.looks_at(opened) == [
        "layer 0:  x <- a 100%, c 100%;  y <- nothing;  z <- a 50%, d 100%",
        "layer 1:  x <- nothing;  y <- d 25%;  z <- nothing",
    ]


def test_an_edge_that_opens_with_the_carry(toy: Any) -> None:
    tokens = torch.tensor(toy.tokenizer()([text + "$" for text in toy.sums(4)])["input_ids"])
    edges = torch.zeros(2, len(tokens), 11, 11, dtype=torch.bool)
    edges[0, :, 6, [1, 4]] = True
    edges[1, :, 6, 2] = tokens[:, 2] + tokens[:, 5] < 4
    edges[1, :, 7, 5] = tokens[:, 2] + tokens[:, 5] >= 4
    edges[1, :, 8, 5] = edges[1, :, 7, 5]  # where z is written, which needs no carry
    right = ["layer 1 x <- b 0% with, 100% without", "layer 1 y <- d 100% with, 0% without"]
    assert toy.follow_carry(edges, tokens, 4) == right


def test_it_runs(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toy, "OUT", tmp_path)
    toy.main(toy.Size(base=3, layers=2, width=16, dense_steps=4, sparse_steps=3))
    said = capsys.readouterr().out
    assert "right answers, of all sums: dense" in said
    assert (tmp_path / "attention.png").stat().st_size > 1000
    opened = torch.tensor(json.loads((tmp_path / "found.json").read_text())["opened"])
    assert opened.shape == (2, 11, 11)
    assert f"open edges of the sparse model: {toy.open_share(opened):.2%}" in said


def test_a_whole_run_found_the_pattern(toy: Any, found: Any) -> None:
    """Digits of the same place in the first layer, the ones' digits, which carry, for x and y in a later one."""
    now = toy.sparse_settings(toy.Size())
    assert not now.changed(found["settings"]), "run the example again and copy its found.json"
    assert now.steps == found["settings"]["steps"]
    opened = torch.tensor(found["opened"])
    assert found["accuracy"] >= 0.99
    assert toy.open_share(opened) <= 0.1
    assert toy.same_place(opened) >= 0.95
    assert opened[0, [6, 6, 7, 7], [1, 4, 1, 4]].min() >= 0.95
    assert opened[1:, [6, 7]][..., [2, 5]].amax((0, 2)).min() >= 0.3
