"""The toy model of two-digit addition: its measures, that it runs, and the pattern in the result of a whole run.

A whole run takes two minutes. `examples/addition_toy.json` is the result of one; a test checks that it was made with
the current settings.
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
def whole_run() -> Any:
    return json.loads((EXAMPLES / "addition_toy.json").read_text())


@pytest.mark.parametrize("base", [4, 10])
def test_sums_are_right(toy: Any, base: int) -> None:
    texts = toy.sums(base)
    assert len(set(texts)) == base**4
    for text in texts:
        assert len(text) == len(toy.MARKS) - 1
        assert int(text[1:3], base) + int(text[4:6], base) == int(text[7:10], base)


def test_measures_of_known_edges(toy: Any) -> None:
    """=, x and y are positions 6, 7 and 8; a, b, c and d are positions 1, 2, 4 and 5."""
    opened = torch.zeros(2, 11, 11)
    opened[0, 6, [1, 4]] = 1.0  # x attends to a and c,
    opened[0, 8, 5] = 1.0  # z to d,
    opened[0, 8, 1] = 0.5  # and to a, which is not added for it
    opened[0, 5, 2] = 1.0  # d does not predict a digit of the sum
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
    edges[1, :, 8, 5] = edges[1, :, 7, 5]  # z does not need the carry
    right = ["layer 1 x <- b 0% with, 100% without", "layer 1 y <- d 100% with, 0% without"]
    assert toy.follow_carry(edges, tokens, 4) == right


def test_it_runs(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(toy, "OUT", tmp_path)
    toy.main(toy.Size(base=3, layers=2, width=16, dense_steps=4, sparse_steps=3))
    output = capsys.readouterr().out
    assert "right answers, of all sums: dense" in output
    assert (tmp_path / "attention.png").stat().st_size > 1000
    opened = torch.tensor(json.loads((tmp_path / "result.json").read_text())["opened"])
    assert opened.shape == (2, 11, 11)
    assert f"open edges of the sparse model: {toy.open_share(opened):.2%}" in output


def test_a_whole_run_has_the_pattern(toy: Any, whole_run: Any) -> None:
    """In layer 0 digits attend to the digits that are added for them; later, x and y attend to the ones (the carry)."""
    settings = toy.sparse_settings(toy.Size())
    assert not settings.changed(whole_run["settings"]), "run the example again and copy its result.json"
    assert settings.steps == whole_run["settings"]["steps"]
    opened = torch.tensor(whole_run["opened"])
    assert whole_run["accuracy"] >= 0.99
    assert toy.open_share(opened) <= 0.1
    assert toy.same_place(opened) >= 0.95
    assert opened[0, [6, 6, 7, 7], [1, 4, 1, 4]].min() >= 0.95
    # x, the digit before y, needs the carry only if the tens do not decide it.
    assert opened[1:, [6, 7]][..., [2, 5]].amax((0, 2)).min() >= 0.2
