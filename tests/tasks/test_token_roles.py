"""The roles of tokens: what each position of a prompt is for its task."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gatelens.tasks import TASKS, task
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import take
from gatelens.tasks.token_roles import FIRST, LAST, PREVIOUS, mark, token_roles, unmark

from .conftest import like_model, real

CIRCUITS = [name for name, entry in TASKS.items() if entry.kind == "circuit"]


def named_tokens(made: CircuitTask, tokenizer: Any) -> list[list[tuple[str, str]]]:
    """The text and the role of every token of each prompt, in the order of the buckets."""
    return [
        [(tokenizer.decode([index]).strip(), made.role_names[role]) for index, role in zip(tokens, roles, strict=True)]
        for bucket in made.buckets
        for tokens, roles in zip(bucket.clean.tolist(), made.roles(bucket).tolist(), strict=True)
    ]


def words(prompt: list[tuple[str, str]], role: str) -> list[str]:
    return [token for token, of in prompt if of == role]


@pytest.mark.parametrize("which", ["gpt2", "llama3", "mistral", "smollm2"])
@pytest.mark.parametrize("name", ["ioi", "ioi-long"])
def test_the_names_of_ioi(name: str, which: str) -> None:
    made = task(name, like_model(real(which)), n=12, seed=1)
    assert isinstance(made, CircuitTask)
    prompts = named_tokens(made, real(which))
    order = [int(i) for bucket in made.buckets for i in bucket.which]
    for prompt, number in zip(prompts, order, strict=True):
        pair = made.pairs[number]
        assert words(prompt, "IO") == [pair.answers[0].strip()]
        assert words(prompt, "S1") == words(prompt, "S2") == [pair.wrong[0].strip()]
        places = [of for _, of in prompt]
        assert places.index("S1") + 1 == places.index("S1+1") < places.index("S2")
    assert all(prompt[0][1] == FIRST and prompt[-1][1] == LAST for prompt in prompts)


def test_years(gpt2: Any) -> None:
    expected = {"gpt2": (1, 1), "llama3": (1, 1), "smollm2": (2, 2)}  # tokens of the century and of the year
    for which, sizes in expected.items():
        made = task("greater-than", like_model(real(which)), n=6)
        assert isinstance(made, CircuitTask)
        for prompt in named_tokens(made, real(which)):
            century, year = words(prompt, "start century"), words(prompt, "start year")
            assert (len(century), len(year)) == sizes
            assert "".join(century + year).isdigit()
            assert len("".join(century + year)) == 4


def test_the_answer_of_a_docstring_is_in_its_definition(gpt2: Any) -> None:
    made = task("docstring", like_model(gpt2), n=8)
    assert isinstance(made, CircuitTask)
    [bucket] = made.buckets
    for prompt, pair in zip(named_tokens(made, gpt2), (made.pairs[i] for i in bucket.which.tolist()), strict=True):
        assert words(prompt, "def answer") == [pair.answers[0].strip()]
        assert words(prompt, "def before answer") == words(prompt, "doc last")
        assert words(prompt, "def earlier") == words(prompt, "doc earlier")
        assert len(words(prompt, "def later")) == 2


def test_the_answer_of_induction_follows_what_was_seen_before(gpt2: Any) -> None:
    made = task("induction", like_model(gpt2), n=8)
    assert isinstance(made, CircuitTask)
    pairs = [made.pairs[i] for bucket in made.buckets for i in bucket.which.tolist()]
    for prompt, pair in zip(named_tokens(made, gpt2), pairs, strict=True):
        assert words(prompt, "answer in block") == [pair.answers[0].strip()]
        assert words(prompt, "seen before") == [prompt[-1][0]]


@pytest.mark.parametrize("name", CIRCUITS)
def test_every_position_has_one_role(name: str, gpt2: Any) -> None:
    made = task(name, like_model(gpt2), n=6)
    assert isinstance(made, CircuitTask)
    assert {FIRST, LAST} < set(made.role_names)
    for bucket in made.buckets:
        roles = made.roles(bucket)
        assert roles.shape == bucket.clean.shape
        assert roles.min() >= 0
        assert (roles[:, 0] == made.role_names.index(FIRST)).all()
        assert (roles[:, -1] == made.role_names.index(LAST)).all()
    few = take(made, 2)
    assert [few.roles(bucket).tolist() for bucket in few.buckets] == [
        [made.token_roles.ids[i, : bucket.clean.shape[1]].tolist() for i in bucket.which.tolist()]
        for bucket in few.buckets
    ]


def test_marks_are_taken_off() -> None:
    text, spans = unmark(f"So {mark('Mary', 'IO')} and {mark('John', 'S1', following='S1+1')}{mark('x', 'end')}")
    assert text == "So Mary and Johnx"
    assert [(text[span.start : span.end], span.role, span.following) for span in spans] == [
        ("Mary", "IO", ""),
        ("John", "S1", "S1+1"),
        ("x", "end", ""),
    ]


def test_places_without_a_name() -> None:
    assert token_roles([["a", "", "b", "", "c"]]).names == (FIRST, "other", "b", PREVIOUS, LAST)
    assert token_roles([["a", "b"], ["c"]]).ids.tolist() == [[0, 1], [1, -1]]


def test_roles_of_a_file(tmp_path: Path, gpt2: Any) -> None:
    line = {
        "clean": "So Mary met John and John smiled at",
        "corrupt": "So Mary met John and Mary smiled at",
        "answer": " Mary",
        "wrong": " John",
        "roles": {"IO": "Mary", "S1": "John", "S2": ["John", 2]},
    }
    file = tmp_path / "my.jsonl"
    file.write_text(json.dumps(line))
    made = task(file, like_model(gpt2))
    assert isinstance(made, CircuitTask)
    roles = [of for _, of in named_tokens(made, gpt2)[0]]
    assert roles == [FIRST, "IO", "other", "S1", "other", "S2", PREVIOUS, LAST]
