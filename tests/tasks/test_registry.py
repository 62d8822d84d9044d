"""Building a task by name, the list of tasks, and draws that are the same on every machine."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from gatelens.cli.task_tables import listing
from gatelens.errors import GatelensError
from gatelens.tasks import TASKS, Entry, task
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.builtin.ioi_long import story
from gatelens.tasks.draw import distinct, generator, rounds

from .conftest import like_model


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ioii", {}, r"no task 'ioii': tasks are aba-abb, .*Did you mean 'ioi'\? `gatelens tasks` describes them"),
        ("zzz", {}, "no task 'zzz': tasks are"),
        ("ioi", {"n": 0}, "a task has 1 to"),
        ("ioi", {"n": -3}, "a task has 1 to"),
        ("ioi", {"color": 3}, "the task ioi has no option 'color': its options are corruption"),
        (
            "greater-than",
            {"corruption": "names"},
            "no option 'corruption': its options are templates",
        ),
        (
            "docstring",
            {"corruption": "names"},
            "docstring has no corruption 'names': corruption is one of both, def",
        ),
        ("addition", {"digit": "hundreds"}, "no digit 'hundreds'"),
        ("syntax", {"kind": "poetry"}, "no kind 'poetry': kind is one of past, plural"),
        ("ioi", {"corruption": ["names"]}, r"no corruption \['names'\]"),
        ("induction", {"length": "ten"}, "the task induction cannot be built with length='ten': "),
        ("aba-abb", {"pattern": "abc"}, "no pattern 'abc'"),
        ("word-pairs", {"relation": "rhyme"}, "no relation 'rhyme'"),
        ("word-pairs", {"ask": "twice"}, "no ask 'twice'"),
        ("word-pairs", {"n": 5000}, "antonym has .* usable items and 5000 were asked for"),
    ],
)
def test_a_mistake_is_named(name: str, options: dict[str, Any], message: str, gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=message):
        task(name, like_model(gpt2), **options)


def test_the_list_shows_every_task_with_its_options_and_an_example() -> None:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(listing())
    text = console.export_text()
    for name, entry in TASKS.items():
        assert name in text
        assert entry.description in text
        assert f": {entry.example[1].strip()}" in text
        for option in entry.options():
            assert option in text
    assert "corruption = names | subject | exchange" in text


def test_every_choice_of_an_option_builds_a_task(gpt2: Any) -> None:
    for name, entry in TASKS.items():
        for option, values in entry.choices.items():
            for value in values:
                options = task(name, like_model(gpt2), n=2, **{option: value}).options
                assert options.get(option, values[0]) == value  # a task need not record its default


def test_a_task_can_be_registered(gpt2: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(tokenizer: Any, n: int, seed: int, *, word: str = " b") -> ResponseTask:
        return response_task(tokenizer, "letters", seed, [("a", word)] * n, word=word)

    monkeypatch.setitem(TASKS, "letters", Entry(build, "response", "Say b.", ("a", " b"), {"word": (" b", " c")}))
    assert [example.response for example in task("letters", like_model(gpt2), n=2, word=" c").examples] == [" c"] * 2  # type: ignore[union-attr]
    with pytest.raises(GatelensError, match="the task letters has no word ' d': word is one of  b,  c"):
        task("letters", like_model(gpt2), word=" d")


def test_64_prompts_unless_asked(gpt2: Any) -> None:
    assert len(task("ioi", like_model(gpt2))) == 64


def test_draws_are_pinned() -> None:
    """If these draws change, every saved result that names a seed changes too."""
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


def test_rounds_go_through_all_items() -> None:
    deck = rounds(generator("test", 0), range(7))
    for _ in range(3):
        assert sorted(next(deck) for _ in range(7)) == list(range(7))


def test_importing_the_tasks_does_not_import_torch() -> None:
    code = "from gatelens.tasks import TASKS; import sys; sys.exit('ioi' not in TASKS or 'torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
