"""Text is data, names are spelled as published, and files are whole, undated and the same every time."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from text_boxes import faults, words

from gatelens.errors import GatelensError
from gatelens.report.figures import FORMATS, save_figure, task_title
from gatelens.report.figures._style import COLOURS, colours, note, power, shape, styled
from gatelens.report.figures._text import shown, shown_token


@styled
def figure(title: str = "title") -> Figure:
    made = Figure(figsize=(3, 2), layout="constrained")
    axis = note(made, "a remark").subplots()
    axis.plot([0, 1], [1, 0], label="line")
    axis.set_title(title)
    axis.legend()
    return made


def test_the_helper_of_these_tests_finds_overlaps_and_cuts() -> None:
    bad = Figure(figsize=(3, 2))
    bad.text(0.5, 0.5, "one")
    bad.text(0.5, 0.52, "two")
    bad.text(0.95, 0.1, "too far right")
    assert faults(bad) == ["'too far right' is cut off", "'one' overlaps 'two'"]
    assert words(bad) == ["one", "two", "too far right"]


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("greater-than", "Greater Than"),
        ("ioi", "IOI"),
        ("ioi-long", "IOI Long"),
        ("docstring", "Docstring"),
        ("common_sense", "Common Sense"),
        ("aba-abb", "ABA ABB"),
        ("McDonald test", "McDonald test"),
        ("runs/my-own.jsonl", "My Own"),
        ("a\nb", "A B"),
    ],
)
def test_tasks_are_spelled_as_published(name: str, title: str) -> None:
    assert task_title(name) == title


@pytest.mark.parametrize(
    ("token", "seen"),
    [
        (" the", "␣the"),
        ("  ", "␣␣"),
        ("a ", "a␣"),
        ("", '""'),
        ("\n", "↵"),
        ("\ta", "⇥a"),
        ("\x07", "\\x07"),
        ("你", "\\u4f60"),
        ("\ud800", "\\ud800"),
        ("$x^2$", "$x^2$"),
        ("<script>", "<script>"),
        ("café", "café"),
    ],
)
def test_tokens_are_shown_whatever_they_are(token: str, seen: str) -> None:
    assert shown_token(token) == seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns of letters that it cannot draw
        assert shown_token(token) in words(figure(shown_token(token)))


def test_dollars_start_no_formula(tmp_path: Path) -> None:
    # As mathematics, this would not even parse.
    assert "$\\frac{$" in words(figure("$\\frac{$"))
    save_figure(figure("$\\frac{$"), tmp_path / "a")


def test_names_keep_their_colour_and_many_names_differ_by_line() -> None:
    names = [f"model {i}" for i in range(15)]
    styles = colours([*names, "model 0"])
    assert list(styles) == names
    assert len(set(styles.values())) == 15
    assert [colour for colour, _ in styles.values()][:7] == list(COLOURS)


@pytest.mark.parametrize(
    ("n", "rows_columns"), [(1, (1, 1)), (4, (1, 4)), (5, (2, 3)), (6, (2, 3)), (8, (2, 4)), (9, (3, 3))]
)
def test_panels_wrap_past_four(n: int, rows_columns: tuple[int, int]) -> None:
    assert shape(n) == rows_columns


def test_powers_and_control_characters() -> None:
    assert [power(value) for value in (1.0, 1000.0, 0.01)] == ["10⁰", "10³", "10⁻²"]
    assert shown("a\r\nb") == "a␍↵b"


def test_a_figure_is_saved_in_three_formats_and_always_the_same(tmp_path: Path) -> None:
    first = save_figure(figure(), tmp_path / "effect-0.9", FORMATS)
    assert [path.name for path in first] == ["effect-0.9.png", "effect-0.9.svg", "effect-0.9.pdf"]
    heads = [path.read_bytes()[:5] for path in first]
    assert (heads[0][1:4], heads[1], heads[2]) == (b"PNG", b"<?xml", b"%PDF-")
    again = save_figure(figure(), tmp_path / "again.png", FORMATS)  # an extension is not doubled
    assert [path.name for path in again] == ["again.png", "again.svg", "again.pdf"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]
    assert b"Date" not in first[1].read_bytes() + first[2].read_bytes()
    assert len(list(tmp_path.iterdir())) == 6
    assert [path.name for path in save_figure(figure(), tmp_path / "plain")] == ["plain.png"]


def test_saving_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GatelensError, match="cannot write the figure"):
        save_figure(figure(), tmp_path / "missing" / "a")
    with pytest.raises(GatelensError, match="no figure format 'bmp'"):
        save_figure(figure(), tmp_path / "a", ["png", "bmp"])
    (tmp_path / "a.png").write_text("old")
    made = figure()
    original = made.savefig

    def fails(path: Path, **kwargs: object) -> None:
        original(path, **kwargs)
        if kwargs["format"] == "pdf":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(made, "savefig", fails)
    with pytest.raises(GatelensError, match="No space left"):
        save_figure(made, tmp_path / "a", FORMATS)
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]
    assert (tmp_path / "a.png").read_text() == "old"
