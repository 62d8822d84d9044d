"""Response tasks: their prompts and responses, and which tokens are targets."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatelens.errors import GatelensError
from gatelens.tasks import TASKS, contrast, from_spec, task
from gatelens.tasks._words import VERBS, past, plural, third_person
from gatelens.tasks.base import ResponseTask
from gatelens.tasks.build import response_task
from gatelens.tasks.builtin import common_sense, math, syntax
from gatelens.tasks.builtin.word_pairs import CAPITALS, RELATIONS
from gatelens.tasks.draw import generator

from .conftest import REAL, like_model, real

RESPONSES = [name for name, entry in TASKS.items() if entry.kind == "response"]


def make(name: str, tokenizer: Any, **settings: Any) -> ResponseTask:
    made = task(name, like_model(tokenizer), **settings)
    assert isinstance(made, ResponseTask)
    return made


@pytest.mark.parametrize("name", RESPONSES)
@settings(max_examples=10, deadline=None)
@given(
    which=st.sampled_from(REAL),
    seed=st.integers(0, 10**9),
    size=st.integers(1, 9),
    side=st.sampled_from(["right", "left"]),
)
def test_batches_hold_every_token_once_and_mark_the_responses(
    name: str, which: str, seed: int, size: int, side: Any
) -> None:
    """Compare with the tokens of each prompt and response."""
    tokenizer = real(which)
    made = make(name, tokenizer, n=7, seed=seed)
    seen = []
    for batch in made.batches(size, side):
        for tokens, mask, targets, i in zip(batch.tokens, batch.mask, batch.targets, batch.which.tolist(), strict=True):
            seen.append(i)
            example = made.examples[i]
            whole = tokenizer(example.prompt + example.response).input_ids
            prompt = tokenizer(example.prompt).input_ids
            assert tokens[mask == 1].tolist() == whole
            assert tokens[targets].tolist() == whole[len(prompt) :] == list(example.response_ids)
            assert not (targets & (mask == 0)).any()
            first = mask.tolist().index(1)
            assert mask.sum() == len(whole)
            assert first == (0 if side == "right" else len(mask) - len(whole))
    assert sorted(seen) == list(range(7))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize(("tokens", "sizes"), [(0, [1] * 7), (100, [2, 2, 2, 1]), (10**6, [7])])
def test_parts_of_a_batch_are_batches_of_like_lengths(side: Any, tokens: int, sizes: list[int], gpt2: Any) -> None:
    made = make("math", gpt2, n=7)
    batch = made.batch(range(7), side)
    assert 50 <= batch.tokens.shape[1] < 100
    parts = batch.parts(tokens)
    assert [len(part.which) for part in parts] == sizes
    order = [i for part in parts for i in part.which.tolist()]
    assert order == sorted(range(7), key=lambda i: len(made.examples[i]))
    for part in parts:
        right = made.batch(part.which.tolist(), side)
        for name in ("tokens", "mask", "targets", "which", "also"):
            assert torch.equal(getattr(part, name), getattr(right, name)), name


@pytest.mark.parametrize("name", RESPONSES)
def test_the_seed_decides_everything(name: str, gpt2: Any) -> None:
    first, again, other = (make(name, gpt2, n=6, seed=seed) for seed in (3, 3, 4))
    assert first.examples == again.examples == make(name, gpt2, n=12, seed=3).examples[:6]
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert from_spec(first.spec(), like_model(gpt2)).fingerprint() == first.fingerprint()
    assert len({example.prompt for example in make(name, gpt2, n=64).examples}) == 64


@pytest.mark.parametrize("name", ["syntax", "common-sense", "math"])
def test_there_are_at_least_300_items(name: str, gpt2: Any) -> None:
    assert len({example.prompt for example in make(name, gpt2, n=310).examples}) == 310


def test_a_bad_batch_size_or_side_is_an_error(gpt2: Any) -> None:
    made = make("math", gpt2, n=2)
    with pytest.raises(GatelensError, match="give a size of at least 1"):
        list(made.batches(0))
    with pytest.raises(GatelensError, match="'middle'"):
        list(made.batches(2, "middle"))  # type: ignore[arg-type]


def test_a_response_that_changes_the_prompt_is_refused(gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=r"example 1 of the task mine .* changes the tokens of the prompt"):
        response_task(gpt2, "mine", 0, [("a b", " c"), ("inter", "national")])


def test_word_forms() -> None:
    assert [past(v) for v in ("go", "stop", "study", "like", "play", "visit")] == (
        ["went", "stopped", "studied", "liked", "played", "visited"]
    )
    assert [third_person(v) for v in ("go", "watch", "carry", "play", "catch", "buy")] == (
        ["goes", "watches", "carries", "plays", "catches", "buys"]
    )
    assert [plural(n) for n in ("child", "city", "box", "toy", "piano", "leaf", "church")] == (
        ["children", "cities", "boxes", "toys", "pianos", "leaves", "churches"]
    )
    assert min(map(len, RELATIONS.values())) >= 64
    assert (RELATIONS["capitalize"]["hot"], RELATIONS["english-french"]["window"]) == ("Hot", "fenêtre")
    assert {phrase[0] for phrase in syntax.PHRASES} <= set(VERBS)


@pytest.mark.parametrize("kind", syntax.KINDS)
def test_syntax_shows_one_worked_example_that_is_not_the_query(kind: str, gpt2: Any) -> None:
    for example in make("syntax", gpt2, n=40, kind=kind).examples:
        instruction, worked, worked_answer, query, blank = example.prompt.split("\n")
        assert instruction == syntax.KINDS[kind].instruction
        assert worked != query
        assert worked_answer.startswith(blank)
        assert example.response.startswith(" ")


def test_questions_and_negations() -> None:
    random = generator("test", 0)
    drawn = {syntax._sentence(random) for _ in range(4000)}
    assert ("She drives a car.", "Does she drive a car?", "She does not drive a car.") in drawn
    assert (
        "The boys caught the train.",
        "Did the boys catch the train?",
        "The boys did not catch the train.",
    ) in drawn
    assert ("You can sing a song.", "Can you sing a song?", "You cannot sing a song.") in drawn
    assert ("We study the map.", "Do we study the map?", "We do not study the map.") in drawn


def test_pronouns_and_tenses() -> None:
    random = generator("test", 0)
    pronouns, tenses = ({syntax.KINDS[kind].draw(random) for _ in range(20000)} for kind in ("pronoun", "tense"))
    assert (
        "My sister opens the door, and then my sister drinks cold water.",
        "My sister opens the door, and then she drinks cold water.",
    ) in pronouns
    assert (
        "The boys walk to school, and then the boys eat an apple.",
        "The boys walk to school, and then they eat an apple.",
    ) in pronouns
    assert ("She drives a car. (past)", "She drove a car.") in tenses
    assert ("We studied the map. (future)", "We will study the map.") in tenses
    assert ("The boy will carry the bag. (present)", "The boy carries the bag.") in tenses
    assert all(query != f"{answer} ({query.rpartition('(')[2]}" for query, answer in tenses)


@pytest.mark.parametrize("shots", [0, 2])
@pytest.mark.parametrize("name", ["syntax", "common-sense", "math", "word-pairs"])
def test_shots_are_worked_examples_with_other_queries(name: str, shots: int, gpt2: Any) -> None:
    made = make(name, gpt2, n=12, shots=shots)
    assert from_spec(made.spec(), like_model(gpt2)).fingerprint() == made.fingerprint()
    label = {"syntax": "", "common-sense": "\nQuestion: ", "math": "Question: ", "word-pairs": " ->"}[name]
    for example in made.examples:
        if label:
            assert f"\n{example.prompt}".count(label) == 1 + shots
        asked = example.prompt.rpartition(label)[2] if name in ("common-sense", "math") else None
        assert asked is None or example.prompt.count(asked) == 1
    with pytest.raises(GatelensError, match="shots is -1: it must be a whole number of at least 0"):
        make(name, gpt2, n=1, shots=-1)


def test_common_sense_has_300_questions_of_five_options() -> None:
    items = common_sense.questions()
    assert len(items) >= 300
    assert len({item[0] for item in items}) == len(items)
    assert all(len(item) == 6 and len(set(item)) == 6 and all(item) for item in items)


def test_common_sense_marks_the_right_option_at_every_letter(gpt2: Any) -> None:
    right = {item[0]: item[1] for item in common_sense.questions()}
    letters = set()
    for example in make("common-sense", gpt2, n=100).examples:
        *_, question, a, b, c, d, e, _ = example.prompt.split("\n")
        options = [a, b, c, d, e]
        chosen = {option[0]: option[3:] for option in options}
        assert chosen[example.response.strip()] == right[question.removeprefix("Question: ")]
        letters.add(example.response)
    assert letters == {" A", " B", " C", " D", " E"}


@settings(max_examples=300, deadline=None)
@given(st.integers())
def test_every_step_of_a_worked_solution_is_right(seed: int) -> None:
    prompt, response, *_ = math.draw_problem(generator("test", seed))
    steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", response)
    assert steps
    known = set(re.findall(r"\d+", prompt))
    for left, sign, right, value in steps:
        assert {left, right} <= known, "a step uses what is not known yet"
        assert {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}.get(
            sign, int(left) / int(right)
        ) == int(value)
        known.add(value)
    assert response.endswith(f" The answer is {steps[-1][3]}.")
    assert "{" not in prompt + response


def test_every_story_is_told() -> None:
    random = generator("test", 0)
    told = {re.sub(r"\d+|\b[A-Z]\w+\b|\b(she|he|her|his)\b", "", math.draw_problem(random)[0]) for _ in range(800)}
    assert len(told) == len(math.STORIES)


@pytest.mark.parametrize("pattern", ["aba", "abb"])
def test_patterns_are_what_they_say_and_of_single_tokens(pattern: str, tokenizer: Any) -> None:
    for example in make("aba-abb", tokenizer, n=12, pattern=pattern).examples:
        lines = (example.prompt + example.response).split("\n")[1:]
        assert len(lines) == 5
        for line in lines:
            a, b, c = line.split("^")
            assert a != b
            assert c == (a if pattern == "aba" else b)
        assert len(example.response_ids) == 1
        # The answer is a token of the same line.
        assert example.response_ids[0] in example.prompt_ids[-4:]


def test_a_contrast_asks_the_same_in_two_ways(gpt2: Any) -> None:
    told, shown = contrast(like_model(gpt2), n=30, relation="country-capital", seed=2)
    assert len(told) == len(shown) == 30
    for by_instruction, by_examples in zip(told.examples, shown.examples, strict=True):
        query = by_instruction.prompt.split("\n")[-1]
        assert by_instruction.response == by_examples.response == f" {CAPITALS[query.removesuffix(' ->')]}"
        *shots, asked = by_examples.prompt.split("\n")
        assert asked == query
        assert len(shots) == 10
        assert not any(shot.startswith(query) for shot in shots)
        assert by_instruction.prompt == f"Name the capital of the country.\n{query}"


def test_padding_does_not_reach_the_prompts(gpt2: Any) -> None:
    made = make("syntax", gpt2, n=5)
    wide = next(made.batches(5))
    assert wide.tokens.dtype == wide.mask.dtype == torch.int64
    assert wide.targets.dtype == torch.bool
    assert (wide.tokens[wide.mask == 0] == made.pad_id).all()
