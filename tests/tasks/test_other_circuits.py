"""Docstring, agreement, induction, colored objects, addition, patterns, word pairs: prompts and answers are right."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gatelens.errors import GatelensError
from gatelens.tasks._words import MEN, WOMEN
from gatelens.tasks.builtin import (
    addition,
    colored_objects,
    docstring,
    gender_pronoun,
    induction,
    pattern_swap,
    shuffled_pairs,
    subject_verb,
)


def arguments(text: str) -> tuple[list[str], list[str]]:
    """The argument names in the definition, and those in the docstring."""
    defined = re.search(r"\(self, (.*)\):", text)
    assert defined
    return defined[1].split(", "), re.findall(r":param (\w+):", text)


def test_docstring_asks_for_the_next_of_six_arguments(tokenizer: Any) -> None:
    for pair in docstring.build(tokenizer, 20, seed=0).pairs:
        defined, documented = arguments(pair.clean)
        assert len(set(defined)) == 6
        assert documented == defined[:3]
        assert pair.answers == (f" {defined[3]}",)
        assert {word.strip() for word in pair.wrong} == set(defined) - {defined[3]}


def test_docstring_with_a_smooth_target(gpt2: Any) -> None:
    plain, smooth = (docstring.build(gpt2, 4, seed=0, target=target) for target in ("metric", "mean"))
    assert (plain.target, smooth.target) == ("metric", "mean")
    assert plain.fingerprint() == smooth.fingerprint()  # the prompts and the metric are the same
    assert "target" not in plain.spec()["options"]
    assert smooth.spec()["options"]["target"] == "mean"


@pytest.mark.parametrize("corruption", docstring.CORRUPTIONS)
def test_docstring_corruptions(corruption: str, gpt2: Any) -> None:
    for pair in docstring.build(gpt2, 20, seed=0, corruption=corruption).pairs:
        (defined, documented), (other, noted) = arguments(pair.clean), arguments(pair.corrupt)
        fresh = not set(other) & set(defined)
        assert fresh == (corruption in ("both", "definition"))
        assert (noted == documented) == (corruption in ("definition", "answer"))
        if corruption == "both":
            assert not set(noted) & {*defined, *other}
        if corruption == "answer":
            assert [a for a, b in zip(defined, other, strict=True) if a != b] == [defined[3]]


def test_gender_pronoun_takes_the_pronoun_of_the_name(tokenizer: Any) -> None:
    answers = set()
    for pair in gender_pronoun.build(tokenizer, 40, seed=0).pairs:
        woman = any(re.search(rf"\b{name}\b", pair.clean) for name in WOMEN)
        assert woman != any(re.search(rf"\b{name}\b", pair.clean) for name in MEN)
        assert woman != any(re.search(rf"\b{name}\b", pair.corrupt) for name in WOMEN)
        assert pair.answers == (" she",) if woman else (" he",)
        answers.add(pair.answers)
    assert len(answers) == 2


def test_subject_verb_agrees_with_the_first_noun(tokenizer: Any) -> None:
    plurals = set(subject_verb.NOUNS.values())
    for pair in subject_verb.build(tokenizer, 40, seed=0).pairs:
        _, subject, _, _, nearest = pair.clean.split()
        assert (subject in plurals) != (nearest in plurals)
        assert (pair.answers == subject_verb.PLURAL_VERBS) == (subject in plurals)
        assert (pair.corrupt.split()[1] in plurals) != (subject in plurals)


def test_induction_repeats_its_block(tokenizer: Any) -> None:
    task = induction.build(tokenizer, 20, seed=0, length=8)
    start = len(tokenizer("").input_ids)
    for bucket in task.buckets:
        for i, clean, corrupt in zip(
            bucket.which.tolist(), bucket.clean.tolist(), bucket.corrupt.tolist(), strict=True
        ):
            block, again = clean[start : start + 8], clean[start + 8 :]
            assert len(set(block)) == 8
            assert again == block[: len(again)]
            assert task.answer_ids[i].tolist() == [block[len(again)]]
            assert set(task.wrong_ids[i].tolist()) == set(block) - {block[len(again)]}
            assert not set(corrupt[start : start + 8]) & set(block)
            assert corrupt[start + 8 :] == again


def test_induction_refuses_a_length_it_cannot_make(gpt2: Any) -> None:
    with pytest.raises(GatelensError, match=r"induction has no length 1: .* from 2 to"):
        induction.build(gpt2, 4, 0, length=1)


def test_colored_objects_asks_for_the_color_of_the_thing(tokenizer: Any) -> None:
    for pair in colored_objects.build(tokenizer, 40, seed=0).pairs:
        things = {thing: color for color, thing in re.findall(r"a (\w+) (\w+)", pair.clean)}
        asked, instead = (text.rsplit(" ", 2)[1] for text in (pair.clean, pair.corrupt))
        assert pair.answers == (f" {things[asked]}",)
        assert {word.strip() for word in pair.wrong} == set(things.values()) - {things[asked]}
        assert instead != asked
        assert instead in things


@pytest.mark.parametrize("digit", addition.PLACES)
def test_addition_is_right_in_every_prompt(digit: str, tokenizer: Any) -> None:
    for pair in addition.build(tokenizer, 30, seed=0, digit=digit).pairs:
        results = []
        for text in (pair.clean, pair.corrupt):
            *shots, last = text.replace(" ", "").split("\n")
            for shot in shots:
                a, b, total = map(int, re.split(r"[+=]", shot))
                assert a + b == total
            a, b = map(int, re.findall(r"\d\d", last)[:2])
            shown = last.split("=")[1]
            assert str(a + b).startswith(shown)
            assert len(shown) == addition.PLACES.index(digit)
            results.append(str(a + b)[len(shown)])
        assert pair.answers[0].strip() == results[0] != results[1]
        assert sorted(word.strip() for word in pair.wrong) == [d for d in "0123456789" if d != results[0]]


def test_a_swapped_pattern_exchanges_the_answers(tokenizer: Any) -> None:
    places = set()
    for pair in pattern_swap.build(tokenizer, 12, seed=0).pairs:
        lines, other = ([line.split("^") for line in text.split("\n")[1:]] for text in (pair.clean, pair.corrupt))
        place = lines[0].index(lines[0][2])
        places.add(place)
        assert len(lines) == 5
        for (a, b, third), (c, d, fourth) in zip(lines[:-1], other[:-1], strict=True):
            assert (a, b) == (c, d)
            assert (third, fourth) == ((a, b)[place], (a, b)[1 - place])
        assert lines[-1] == other[-1]
        assert (pair.answers, pair.wrong) == ((lines[-1][place],), (lines[-1][1 - place],))
    assert places == {0, 1}


@pytest.mark.parametrize("relation", shuffled_pairs.RELATIONS)
def test_shuffled_pairs_have_the_right_answers_and_then_the_wrong_ones(relation: str, gpt2: Any) -> None:
    answers = shuffled_pairs.RELATIONS[relation]
    for pair in shuffled_pairs.build(gpt2, 6, seed=0, relation=relation).pairs:
        (*shown, asked), (*mixed, same) = (
            [line.split(" ->") for line in text.split("\n")] for text in (pair.clean, pair.corrupt)
        )
        assert len(shown) == 10
        assert all(said == f" {answers[word]}" for word, said in shown)
        assert asked == same == [asked[0], ""]
        assert pair.answers == (f" {answers[asked[0]]}",)
        assert [word for word, _ in mixed] == [word for word, _ in shown]
        assert sorted(said for _, said in mixed) == sorted(pair.wrong) == sorted(said for _, said in shown)
        assert all(before[1] != after[1] for before, after in zip(shown, mixed, strict=True))


def test_shuffled_pairs_need_enough_pairs(gpt2: Any) -> None:
    with pytest.raises(GatelensError, match="at least 2, because answers are shuffled"):
        shuffled_pairs.build(gpt2, 4, 0, shots=1)
    with pytest.raises(GatelensError, match="the task needs 501 answers"):
        shuffled_pairs.build(gpt2, 4, 0, shots=500)
