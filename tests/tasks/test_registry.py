"""Asking for a task by name, the list of tasks, and draws that are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from gatelens.errors import GatelensError
from gatelens.tasks import TASKS, task
from gatelens.tasks.builtin.ioi_long import story
from gatelens.tasks.draw import distinct, generator, rounds
from gatelens.tasks.preview import listing

from .conftest import like_model


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ioii", {}, r"no task 'ioii': tasks are aba-abb, .*Did you mean 'ioi'\? `gatelens tasks` lists them"),
        ("zzz", {}, "no task 'zzz': tasks are"),
        ("ioi", {"n": 0}, "at least one prompt"),
        ("ioi", {"n": -3}, "at least one prompt"),
        ("ioi", {"color": 3}, "task ioi has no option 'color': its options are corruption"),
        ("greater-than", {"corruption": "names"}, "it has none"),
        ("docstring", {"corruption": "names"}, "no corruption 'names'"),
        ("addition", {"digit": "hundreds"}, "no digit 'hundreds'"),
        ("syntax", {"kind": "poetry"}, "no kind 'poetry': it is one of past, plural"),
        ("aba-abb", {"pattern": "abc"}, "no pattern 'abc'"),
        ("word-pairs", {"relation": "rhyme"}, "no relation 'rhyme'"),
        ("word-pairs", {"ask": "twice"}, "no ask 'twice'"),
        ("word-pairs", {"n": 5000}, "antonym has .* usable items and 5000 were asked for"),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, Any], message: str, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=message):
        task(name, like_model(gpt2), **options)


def test_the_list_shows_every_task_with_an_example() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(listing())
    text = console.export_text()
    for name, entry in TASKS.items():
        assert name in text
        assert entry.description in text
        assert repr(entry.example[1]) in text


def test_64_prompts_unless_asked(gpt2: Any) -> None:
    assert len(task("ioi", like_model(gpt2))) == 64


def test_draws_are_pinned() -> None:
    """If this changes, every saved result that names a seed does too."""
    random = generator("ioi", 0)
    assert [random.randrange(1000) for _ in range(5)] == [605, 146, 803, 653, 168]
    assert story(generator("ioi-long", 0)) == (
        "After a long drive {A} and {B} finally reached the {place} just outside the city. "
        "The weather had been cold all week, but it was dry. "
        "It was louder than usual because of a rather large school visit. "
        "Later on that evening, {S} showed a {object} to"
    )


def test_draws_differ_between_tasks_and_seeds() -> None:
    draws = {generator(name, seed).random() for name in ("ioi", "math") for seed in (0, 1, -1)}
    assert len(draws) == 6


def test_distinct_begins_again_when_there_is_nothing_new() -> None:
    random = generator("test", 0)
    drawn = distinct(25, lambda: random.choice("abcdefghij"), key=str)
    assert sorted(drawn[:10]) == sorted(drawn[10:20]) == list("abcdefghij")
    assert len(set(drawn[20:])) == 5


def test_rounds_go_through_all() -> None:
    deck = rounds(generator("test", 0), range(7))
    for _ in range(3):
        assert sorted(next(deck) for _ in range(7)) == list(range(7))


def test_the_list_needs_no_torch() -> None:
    code = "import gatelens.tasks, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
