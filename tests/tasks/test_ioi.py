"""Indirect object identification: names, orders and corruptions."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from gatelens.errors import GatelensError
from gatelens.tasks import task
from gatelens.tasks._words import NAMES
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.builtin import ioi, ioi_long
from gatelens.tasks.tokens import encode

from .conftest import LARGE, like_model, real

ANY_NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")
BUILDERS = {"ioi": ioi.build, "ioi-long": ioi_long.build}


def names(text: str) -> list[str]:
    return ANY_NAME.findall(text)


def test_there_are_enough_templates_names_places_and_objects(tokenizer: Any) -> None:
    assert len(set(ioi.TEMPLATES)) >= 15
    assert len(ioi.PLACES) == len(ioi.OBJECTS) == 8
    assert len(ioi.single_tokens(tokenizer, NAMES, "names", least=100)) >= 100


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_the_answer_is_the_name_that_comes_once_in_both_orders(build: Any, gpt2: Any) -> None:
    orders = Counter()
    for pair in build(gpt2, 60, seed=0).pairs:
        first, second, again = names(pair.clean)
        assert again in (first, second)
        io = second if again == first else first
        assert pair.answers == (f" {io}",)
        assert pair.wrong == (f" {again}",)
        orders["ABBA" if io == first else "BABA"] += 1
    assert min(orders["ABBA"], orders["BABA"]) > 15


@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
@pytest.mark.parametrize("corruption", ioi.CORRUPTIONS)
def test_a_corruption_changes_the_names_it_says_and_nothing_else(build: Any, corruption: str, gpt2: Any) -> None:
    for pair in build(gpt2, 30, seed=5, corruption=corruption).pairs:
        clean, corrupt = names(pair.clean), names(pair.corrupt)
        assert ANY_NAME.sub("_", pair.clean) == ANY_NAME.sub("_", pair.corrupt)
        if corruption == "names":
            assert len({*clean, *corrupt}) == 2 + 3
        elif corruption == "subject":
            assert corrupt[:2] == clean[:2]
            assert corrupt[2] not in clean
        else:
            partner = {clean[0]: clean[1], clean[1]: clean[0]}
            assert corrupt == [partner[name] for name in clean]


def test_an_unknown_corruption_is_an_error(gpt2: Any) -> None:
    with pytest.raises(GatelensError, match="no corruption 'noise': corruption is one of names, subject, exchange"):
        task("ioi", like_model(gpt2), n=4, corruption="noise")


@pytest.mark.parametrize("which", LARGE)
def test_long_stories_have_35_to_60_tokens(which: str) -> None:
    tokenizer = real(which)
    lengths = [len(ids) for ids in encode(tokenizer, [pair.clean for pair in ioi_long.build(tokenizer, 80, 0).pairs])]
    assert min(lengths) >= 35
    assert max(lengths) <= 60
    assert len(set(lengths)) <= 10  # the parts of a story have matching lengths, so there are few buckets


def test_in_a_long_story_nobody_is_named_between() -> None:
    assert not any(names(text) for text in ioi_long.DISTRACTORS)


def test_the_metric_is_the_logit_of_io_minus_that_of_s(gpt2: Any) -> None:
    made: CircuitTask = ioi.build(gpt2, 6, seed=0)
    for bucket in made.buckets:
        logits = torch.randn(len(bucket), 50257)
        for place, i in enumerate(bucket.which.tolist()):
            io, s = (gpt2(text).input_ids[0] for text in (made.pairs[i].answers[0], made.pairs[i].wrong[0]))
            assert made.metric(logits, bucket)[place] == logits[place, io] - logits[place, s]
