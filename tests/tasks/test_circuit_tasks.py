"""What holds for every circuit task and every tokenizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gatelens.errors import GatelensError
from gatelens.tasks import TASKS, from_spec, task
from gatelens.tasks.base import Bucket, CircuitTask
from gatelens.tasks.tokens import encode

from .conftest import LARGE, REAL, like_model, real

CIRCUITS = [name for name, entry in TASKS.items() if entry.kind == "circuit"]
CHOICES = {
    "ioi": [{"corruption": c} for c in ("names", "subject", "exchange")],
    "ioi-long": [{"corruption": c} for c in ("names", "subject", "exchange")],
    "docstring": [{"corruption": c} for c in ("both", "definition", "docstring", "answer")],
    "addition": [{"digit": d} for d in ("tens", "ones")],
    "induction": [{"length": 4}, {"length": 12}],
    "shuffled-pairs": [{"relation": r, "shots": 5} for r in ("antonym", "english-french", "singular-plural")],
}

# A vocabulary of 512 tokens splits most of the words that these tasks need.
TOO_MANY_WORDS = ("ioi", "ioi-long", "docstring", "subject-verb", "colored-objects", "shuffled-pairs")


def make(name: str, tokenizer: Any, **settings: Any) -> CircuitTask:
    made = task(name, like_model(tokenizer), **settings)
    assert isinstance(made, CircuitTask)
    return made


def token_ids(made: CircuitTask) -> list[tuple[list[int], list[int]]]:
    """Clean and corrupt token ids of each prompt, in the task's order."""
    by_index = {
        i: (clean, corrupt)
        for bucket in made.buckets
        for i, clean, corrupt in zip(bucket.which.tolist(), bucket.clean.tolist(), bucket.corrupt.tolist(), strict=True)
    }
    assert sorted(by_index) == list(range(len(made)))
    return [by_index[i] for i in range(len(made))]


@pytest.mark.parametrize("name", CIRCUITS)
@settings(max_examples=12, deadline=None)
@given(which=st.sampled_from(LARGE), seed=st.integers(0, 10**9), data=st.data())
def test_every_pair_is_aligned_and_every_answer_one_token(
    name: str, which: str, seed: int, data: st.DataObject
) -> None:
    tokenizer = real(which)
    options = data.draw(st.sampled_from(CHOICES.get(name, [{}])))
    made = make(name, tokenizer, n=8, seed=seed, **options)
    assert len(made) == len(made.pairs) == 8
    assert len({pair.clean for pair in made.pairs}) == 8
    for pair, (clean, corrupt), answers, wrong in zip(
        made.pairs, token_ids(made), made.answer_ids.tolist(), made.wrong_ids.tolist(), strict=True
    ):
        assert len(clean) == len(corrupt)
        assert clean != corrupt
        if name == "induction":  # drawn as tokens and not as text
            continue
        assert encode(tokenizer, [pair.clean, pair.corrupt]) == [clean, corrupt]
        for texts, ids in ((pair.answers, answers), (pair.wrong, wrong)):
            together = encode(tokenizer, [pair.clean + text for text in texts])
            assert together == [[*clean, index] for index in ids if index >= 0]
        assert not {i for i in answers if i >= 0} & {i for i in wrong if i >= 0}


@pytest.mark.parametrize("name", CIRCUITS)
def test_the_seed_decides_everything(name: str, gpt2: Any) -> None:
    first, again, other = (make(name, gpt2, n=6, seed=seed) for seed in (3, 3, 4))
    assert first.pairs == again.pairs
    assert first.fingerprint() == again.fingerprint() != other.fingerprint()
    assert make(name, gpt2, n=12, seed=3).pairs[:6] == first.pairs


@pytest.mark.parametrize("name", CIRCUITS)
def test_a_spec_makes_the_same_task_again(name: str, gpt2: Any) -> None:
    made = make(name, gpt2, n=5, seed=2, **CHOICES.get(name, [{}])[-1])
    again = from_spec(made.spec(), like_model(gpt2))
    assert again.fingerprint() == made.fingerprint()
    assert again.spec() == made.spec()


@pytest.mark.parametrize("name", CIRCUITS)
@pytest.mark.parametrize("which", REAL)
def test_a_tokenizer_does_the_task_or_says_why_not(name: str, which: str) -> None:
    tokenizer = real(which)
    if which == "stories" and name in TOO_MANY_WORDS:
        with pytest.raises(GatelensError, match="this tokenizer has"):
            make(name, tokenizer, n=3)
    else:
        assert len(make(name, tokenizer, n=3)) == 3


def test_the_small_vocabulary_does_what_its_words_allow() -> None:
    tokenizer = real("stories")
    for name, options in (
        ("ioi", {"corruption": "exchange"}),
        ("ioi", {"corruption": "subject"}),
        ("greater-than", {}),
        ("gender-pronoun", {}),
        ("induction", {}),
        ("addition", {}),
    ):
        assert len(make(name, tokenizer, n=3, **options)) == 3


def test_ten_thousand_prompts_are_different_and_tokenised_together(gpt2: Any) -> None:
    """A call of the tokenizer for each prompt would take minutes."""
    calls = []

    class Counting:
        def __call__(self, *args: Any, **options: Any) -> Any:
            calls.append(args)
            return gpt2(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(gpt2, name)

    made = make("ioi", Counting(), n=10_000)
    assert len({pair.clean for pair in made.pairs}) == 10_000
    assert len(calls) < 100


def small_task(difference: str) -> CircuitTask:
    """Two prompts over a vocabulary of five: answers 1 and 2 against 3; answer 4 against 0 and 1."""
    bucket = Bucket(torch.zeros(2, 3), torch.ones(2, 3), torch.tensor([0, 1]))
    answers, wrong = torch.tensor([[1, 2], [4, -1]]), torch.tensor([[3, -1], [0, 1]])
    return CircuitTask("small", 0, [], [bucket], answers, wrong, difference)  # type: ignore[arg-type]


def test_logit_difference_by_hand() -> None:
    made = small_task("logit")
    logits = torch.tensor([[9.0, 1.0, 2.5, 4.0, 9.0], [1.0, 3.0, 9.0, 9.0, 5.0]])
    assert made.metric(logits, made.buckets[0]).tolist() == [2.5 - 4.0, 5.0 - 3.0]
    assert made.correct(logits, made.buckets[0]).tolist() == [False, True]


def test_probability_difference_by_hand() -> None:
    made = small_task("probability")
    probabilities = torch.tensor([[0.1, 0.2, 0.3, 0.25, 0.15], [0.3, 0.2, 0.1, 0.1, 0.3]])
    metric = made.metric(probabilities.log() + 7, made.buckets[0])
    torch.testing.assert_close(metric, torch.tensor([0.5 - 0.25, 0.3 - 0.5]))
    assert made.correct(probabilities.log(), made.buckets[0]).tolist() == [True, False]


@pytest.mark.parametrize("difference", ["logit", "probability"])
def test_the_metric_takes_leading_axes_and_low_precision_and_gradients(difference: str) -> None:
    made = small_task(difference)
    logits = torch.randn(4, 3, 2, 5, requires_grad=True)
    metric = made.metric(logits, made.buckets[0])
    assert metric.shape == (4, 3, 2)
    torch.testing.assert_close(metric[2, 1], made.metric(logits[2, 1], made.buckets[0]))
    metric.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.abs().sum() > 0
    assert made.metric(logits.bfloat16(), made.buckets[0]).dtype == torch.float32


def test_which_puts_results_back_in_order(gpt2: Any) -> None:
    made = make("ioi", gpt2, n=20)
    assert len(made.buckets) > 1
    for bucket in made.buckets:
        for i, clean in zip(bucket.which.tolist(), bucket.clean.tolist(), strict=True):
            assert gpt2.decode(clean) == made.pairs[i].clean
