"""Greater-than with real tokenizers, compared with brute force over strings."""

from __future__ import annotations

from typing import Any

import pytest

from gatelens.errors import GatelensError
from gatelens.tasks.builtin.greater_than import EVENTS, TEMPLATES, build, decidable_years

from .conftest import REAL, made, real

STYLES = {"gpt2": "two digits", "neox": "two digits", "llama3": "three digits"}
NUMBERS = " ".join(f"{i:0{width}}" for width in (1, 2, 3, 4) for i in range(10**width))
TEXT = " ".join([*TEMPLATES, *EVENTS, NUMBERS, "so"])


@pytest.mark.parametrize("which", REAL)
def test_above_and_not_above_agree_with_every_year_written_out(which: str) -> None:
    """Write every end year after the text of the prompt, and look at the next token."""
    tokenizer = real(which)
    task = build(tokenizer, 24, seed=1)
    for pair, answers, wrong in zip(task.pairs, task.answer_ids.tolist(), task.wrong_ids.tolist(), strict=True):
        start = int(pair.clean.split("from the year ")[1][:4])
        shown = pair.clean.rsplit(" ", 1)[1]
        prompt = tokenizer(pair.clean).input_ids
        above, others = set(), set()
        for year in range(1000, 2000):
            if not str(year).startswith(shown):
                continue
            ids = tokenizer(pair.clean + str(year)[len(shown) :]).input_ids
            if ids[: len(prompt)] == prompt and len(ids) > len(prompt):
                (above if year > start else others).add(ids[len(prompt)])
        assert above
        assert others
        assert not above & others, "the next token does not decide"
        assert above == {index for index in answers if index >= 0}
        assert others == {index for index in wrong if index >= 0}


@pytest.mark.parametrize("which", REAL)
def test_years_and_prompts_follow_the_way_the_tokenizer_splits(which: str) -> None:
    starts = decidable_years(real(which))
    assert all(11 <= start.year // 100 <= 17 and 2 <= start.year % 100 <= 98 for start in starts)
    style = STYLES.get(which, "single digits")
    ends = {len(start.end) for start in starts}
    if style == "two digits":
        assert ends == {2}
        assert len(starts) > 300
        assert {len(token) for start in starts for token in start.above} == {2}
    elif style == "three digits":
        assert ends == {3}
        assert {start.year % 10 for start in starts} == set(range(9))
    else:
        assert ends == {2}
        assert [start.year for start in starts] == [100 * c + 10 * d + 9 for c in range(11, 18) for d in range(9)]


def test_the_corrupt_prompt_has_year_01_and_nothing_else_differs(gpt2: Any) -> None:
    for pair in build(gpt2, 20, seed=0).pairs:
        start = pair.clean.split("from the year ")[1][:4]
        assert pair.corrupt == pair.clean.replace(start, f"{start[:2]}01", 1)


@pytest.mark.parametrize(("pattern", "prompt_digits"), [(r" |\d\d|\w+?(?=\d)|\w+", 2), (r" |\d{3}|\d|[a-z]+|\w+", 3)])
def test_hand_made_splits(pattern: str, prompt_digits: int) -> None:
    starts = decidable_years(made(pattern, TEXT))
    assert {len(start.end) for start in starts} == {prompt_digits}
    assert len(starts) > 500


@pytest.mark.parametrize("pattern", [r" |\d{4}|\w+", r" |\d(?=\d{3}$)|\d{3}$|\d+|[a-z]+|\w+"], ids=["whole", "1 732"])
def test_a_split_that_cannot_be_decided_is_a_clear_error(pattern: str) -> None:
    with pytest.raises(GatelensError, match="splits a year after the century or the decade"):
        build(made(pattern, TEXT), 4, seed=0)
