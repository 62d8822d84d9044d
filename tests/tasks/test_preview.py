"""How well a model does on a task, as `gatelens tasks` shows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from gatelens.cli.task_tables import render
from gatelens.tasks import task
from gatelens.tasks.base import CircuitTask, Example, ResponseTask
from gatelens.tasks.preview import by_guessing, hardly_known, preview


def printed(result: Any) -> str:
    console = Console(width=120, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(result))
    return console.export_text()


class Oracle:
    """A stand-in for a Hugging Face model. It knows some prompts, and favours one token after each."""

    device = torch.device("cpu")

    def __init__(self, favoured: dict[tuple[int, ...], int], vocab: int) -> None:
        self.favoured, self.vocab = favoured, vocab

    def __call__(self, tokens: torch.Tensor, logits_to_keep: int) -> Any:
        logits = torch.zeros(len(tokens), 1, self.vocab)
        for i, prompt in enumerate(tokens.tolist()):
            if tuple(prompt) in self.favoured:
                logits[i, 0, self.favoured[tuple(prompt)]] = 3.0
        return SimpleNamespace(logits=logits)


def test_the_share_answered_correctly_and_the_warning(gpt2: Any) -> None:
    made = task("ioi", SimpleNamespace(name="oracle", tokenizer=gpt2), n=20)
    assert isinstance(made, CircuitTask)
    right: dict[tuple[int, ...], int] = {}
    for bucket in made.buckets:
        for i, clean in zip(bucket.which.tolist(), bucket.clean.tolist(), strict=True):
            right[tuple(clean)] = int(made.answer_ids[i, 0] if i >= 5 else made.wrong_ids[i, 0])
    model = SimpleNamespace(name="oracle", tokenizer=gpt2, hf=Oracle(right, 50257))
    result = preview(model, made)
    assert result.figures["answered correctly"] == 0.75
    assert result.figures["logit difference on clean prompts"] == pytest.approx(3 * 15 / 20 - 3 * 5 / 20)
    assert result.figures["logit difference on corrupt prompts"] == 0
    assert [prompt.right for prompt in result.shown] == [False] * 5 + [True] * 5
    assert result.warning is None
    text = printed(result)
    assert "ioi on oracle: 10 of 20 prompts" in text
    assert f"right: {made.pairs[0].answers[0]!r}" in text
    assert f"wrong: {made.pairs[0].wrong[0]!r}" in text
    assert made.pairs[0].corrupt in text.replace("\n", " ")
    assert "75.0%" in text
    assert "Warning" not in text

    ignorant = preview(SimpleNamespace(name="ignorant", tokenizer=gpt2, hf=Oracle({}, 50257)), made)
    assert ignorant.warning is not None
    assert ignorant.warning.startswith("ignorant answers 0% of ioi correctly, less than 70%. It hardly has the")
    assert ignorant.warning.endswith("so a circuit for it means little.")
    assert "Warning: ignorant" in printed(ignorant)


def test_a_response_task_on_a_real_model(trained: Any) -> None:
    """Compare with plain forward passes without padding, one example at a time."""
    made = task("syntax", trained, n=6)
    assert isinstance(made, ResponseTask)
    result = preview(trained, made)
    total, hits, count = 0.0, 0, 0
    for example in made.examples:
        ids = torch.tensor([example.prompt_ids + example.response_ids])
        with torch.no_grad():
            log_probs = trained.hf(ids).logits.log_softmax(-1)[0, len(example.prompt_ids) - 1 : -1]
        target = torch.tensor(example.response_ids)
        total += log_probs.gather(-1, target[:, None]).sum().item()
        hits += int((log_probs.argmax(-1) == target).sum())
        count += len(target)
    assert result.figures["log-probability of a response"] == pytest.approx(total / 6, rel=1e-4)
    assert result.figures["response tokens predicted"] == pytest.approx(hits / count)
    assert len(result.shown) == 6
    assert "syntax on" in printed(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "level"), [("ioi", 0.75), ("ioi-long", 0.75), ("docstring", 0.75), ("greater-than", 0.8)]
)
def test_the_built_in_model_has_the_behaviour(name: str, level: float, smollm2: Any) -> None:
    made = task(name, smollm2, n=12)
    assert preview(smollm2, made).figures["answered correctly"] >= level


def test_a_share_that_guessing_can_reach_gives_a_warning() -> None:
    two_way = ResponseTask("two", 0, [Example(str(i), " x", (1,), (5 + i % 2,)) for i in range(20)])
    assert by_guessing(two_way) == (0.5, pytest.approx(2 * (0.25 / 20) ** 0.5))
    for share in (0.5, 0.7):  # 0.5 + 0.22
        warning = hardly_known("small", two_way, share)
        assert warning is not None
        assert (
            f"predicts {share:.0%} of the response tokens of two, hardly more than always giving the most common"
            in warning
        )
    assert hardly_known("small", two_way, 0.75) is None
    assert "less than 50%" in str(hardly_known("small", two_way, 0.4))


def test_responses_that_cannot_be_guessed_only_have_to_reach_50_percent() -> None:
    same = ResponseTask("same", 0, [Example("", "", (1,), (5,))] * 20)
    long = ResponseTask("long", 0, [Example("", "", (1,), (5, 6 + i % 2)) for i in range(20)])
    several = ResponseTask("several", 0, [Example("", "", (1,), (5 + i % 2,), also=(8,)) for i in range(20)])
    for task_ in (same, long, several):
        assert by_guessing(task_) == (0, 0)
        assert hardly_known("small", task_, 0.5) is None
