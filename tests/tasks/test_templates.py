"""Tasks know their templates, and can be split by prompts and by templates."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import random_task

import gatelens.tasks
from gatelens import GatelensError
from gatelens.tasks.base import CircuitTask
from gatelens.tasks.batches import halves, select, take, template_halves

OPTIONS: dict[str, dict[str, Any]] = {
    "ioi": {},
    "ioi-long": {},
    "gender-pronoun": {},
    "colored-objects": {},
    "greater-than": {"templates": "several"},
    "docstring": {"templates": "several"},
}
MOST = {"ioi": 18, "ioi-long": 8, "greater-than": 4, "docstring": 4}


class Holder:
    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer


def task(name: str, gpt2: Any, **options: Any) -> CircuitTask:
    return gatelens.tasks.task(name, Holder(gpt2), n=48, **options)  # type: ignore[return-value]


@pytest.mark.parametrize("name", OPTIONS)
def test_every_prompt_has_the_text_of_its_template(name: str, gpt2: Any) -> None:
    pairs = task(name, gpt2, **OPTIONS[name]).pairs
    for pair in pairs:
        pattern = ".+".join(re.escape(part) for part in re.split(r"\{\w*\}", pair.template))
        for prompt in (pair.clean, pair.corrupt):
            assert re.search(pattern, prompt), (pair.template, prompt)
    templates = {pair.template for pair in pairs}
    assert 2 <= len(templates) <= MOST.get(name, 48)


@pytest.mark.parametrize("name", ["greater-than", "docstring"])
def test_published_tasks_have_one_template(name: str, gpt2: Any) -> None:
    one = task(name, gpt2)
    assert len({pair.template for pair in one.pairs}) == 1
    assert template_halves(one) is None
    several = task(name, gpt2, templates="several")
    again = gatelens.tasks.from_spec(several.spec(), Holder(gpt2))
    assert again.fingerprint() == several.fingerprint() != one.fingerprint()


def prompts(part: CircuitTask) -> dict[str, tuple[Any, ...]]:
    """Everything that belongs to a prompt, by its text."""
    return {
        part.pairs[number].clean: (
            clean.tolist(),
            corrupt.tolist(),
            part.answer_ids[number].tolist(),
            part.wrong_ids[number].tolist(),
            part.roles(bucket)[row].tolist(),
        )
        for bucket in part.buckets
        for row, (number, clean, corrupt) in enumerate(
            zip(bucket.which.tolist(), bucket.clean, bucket.corrupt, strict=True)
        )
    }


class TestSelect:
    def test_prompts_keep_what_belongs_to_them(self) -> None:
        whole = random_task(n=7, lengths=(5, 4, 6))
        part = select(whole, [6, 0, 3])
        assert [pair.clean for pair in part.pairs] == ["clean 6", "clean 0", "clean 3"]
        every = prompts(whole)
        assert prompts(part) == {name: every[name] for name in ("clean 6", "clean 0", "clean 3")}
        for bucket in part.buckets:
            assert bucket.which.tolist() == sorted(bucket.which.tolist())

    def test_the_first_prompts(self) -> None:
        whole = random_task(n=5, lengths=(5, 4))
        assert prompts(take(whole, 2)).keys() == {"clean 0", "clean 1"}
        assert take(whole, 9).fingerprint() == whole.fingerprint()

    def test_halves_share_no_prompt(self) -> None:
        whole = random_task(n=7, lengths=(5, 4))
        one, other = halves(whole)
        assert (len(one), len(other)) == (3, 4)
        assert prompts(one) | prompts(other) == prompts(whole)

    def test_halves_of_templates_share_no_template(self, gpt2: Any) -> None:
        one, other = template_halves(task("ioi", gpt2)) or ((), ())
        templates = [{pair.template for pair in half.pairs} for half in (one, other)]
        assert not templates[0] & templates[1]
        assert abs(len(templates[0]) - len(templates[1])) <= 1
        assert len(one) + len(other) == 48


def test_own_files_name_their_templates(tmp_path: Path, gpt2: Any) -> None:
    line = {"clean": "So Mary met John and", "corrupt": "So Mary met Paul and", "answer": " John", "wrong": " Paul"}
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps({**line, "template": name}) + "\n" for name in ("a", "a", "b")))
    own = gatelens.tasks.task(path, Holder(gpt2))
    assert [pair.template for pair in own.pairs] == ["a", "a", "b"]
    one, other = template_halves(own) or ((), ())
    assert sorted((len(one), len(other))) == [1, 2]
    path.write_text(json.dumps({**line, "template": 3}))
    with pytest.raises(GatelensError, match="'template' must be a text"):
        gatelens.tasks.task(path, Holder(gpt2))


def test_prompts_that_are_selected_are_counted_from_zero() -> None:
    part = select(random_task(n=6, lengths=(5, 4)), [5, 2])
    assert torch.cat([bucket.which for bucket in part.buckets]).sort().values.tolist() == [0, 1]
