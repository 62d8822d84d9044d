"""From text to token ids: what a task needs to know about a tokenizer, and the checks made with it.

Text is tokenised as Hugging Face would by default (a beginning-of-text token where the tokenizer adds one), and an
answer is what follows the prompt's tokens when prompt and answer are tokenised *together*.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gatelens.errors import GatelensError

# An answer's tokens depend on the text next to the seam only, so one look-up serves all prompts with the same end.
SEAM = 8
# How vocabularies write a word with its leading space, and one without.
SPACED_WORD = re.compile("[Ġ▁][A-Za-z]{2,}")
BARE_WORD = re.compile("[A-Za-z]{2,}")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks use."""

    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def __call__(self, text: list[str], return_attention_mask: bool = ...) -> Any: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Pair:
    """One prompt pair as text; answers and wrong answers follow the prompt, with their leading space if any."""

    clean: str
    corrupt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class PairTokens:
    """One prompt pair as token ids; each answer and each wrong answer is one token."""

    clean: list[int]
    corrupt: list[int]
    answers: list[int]
    wrong: list[int]

    def __len__(self) -> int:
        return len(self.clean)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text, in one call of the tokenizer."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(list(texts), return_attention_mask=False)["input_ids"]
    return ids


def continuations(
    tokenizer: Tokenizer, prompts: Sequence[str], prompt_ids: Sequence[list[int]], answers: Sequence[str]
) -> list[list[int] | None]:
    """The ids each answer adds to its prompt, or None where the prompt's own ids change when it is continued."""
    joint = encode(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    return [
        ids[len(before) :] if ids[: len(before)] == before else None
        for before, ids in zip(prompt_ids, joint, strict=True)
    ]


def single_tokens(tokenizer: Tokenizer, words: Sequence[str], what: str, least: int) -> list[str]:
    """Those of the words that are one token after a space; an error if fewer than `least` are."""
    before = encode(tokenizer, ["so"])[0]
    added = continuations(tokenizer, ["so"] * len(words), [before] * len(words), [f" {word}" for word in words])
    single = [word for word, ids in zip(words, added, strict=True) if ids is not None and len(ids) == 1]
    if len(single) < least:
        split = [word for word in words if word not in single]
        raise GatelensError(
            f"the task needs {least} {what} of one token each and this tokenizer has {len(single)} of them: it splits "
            f"{', '.join(split[:8])}{' and others' if len(split) > 8 else ''}; take a model with a larger vocabulary."
        )
    return single


def preferably_single(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """The words that are one token after a space, or all of them where those are few: for words that stay the same
    in the clean and the corrupt prompt, so that the two have the same length either way."""
    single = single_tokens(tokenizer, words, "words", least=0)
    return single if 2 * len(single) >= len(words) else list(words)


def word_tokens(tokenizer: Tokenizer, spaced: bool) -> list[int]:
    """Ids of the tokens that are words, with a leading space or without, in order.

    Where the vocabulary has few of these (bytes, characters), all its tokens but the special ones.
    """
    form = SPACED_WORD if spaced else BARE_WORD
    special = set(tokenizer.all_special_ids)
    vocabulary = [(index, token) for token, index in tokenizer.get_vocab().items() if index not in special]
    plain = sorted(index for index, token in vocabulary if form.fullmatch(token))
    return plain if len(plain) >= 50 else sorted(index for index, _ in vocabulary)


def tokenise(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> tuple[list[PairTokens | None], dict[int, str]]:
    """Token ids of each pair, and what is wrong with those pairs that have none (index -> one sentence)."""
    clean = encode(tokenizer, [pair.clean for pair in pairs])
    corrupt = encode(tokenizer, [pair.corrupt for pair in pairs])
    answer_ids = _answer_ids(tokenizer, pairs, clean)
    rows: list[PairTokens | None] = []
    problems: dict[int, str] = {}
    for i, pair in enumerate(pairs):
        try:
            _check_alignment(pair, clean[i], corrupt[i])
            answers, wrong = (
                [_one_token(pair.clean, text, answer_ids[_seam(pair.clean, text)]) for text in texts]
                for texts in (pair.answers, pair.wrong)
            )
            if set(answers) & set(wrong):
                raise ValueError(f"an answer to {pair.clean!r} is the same token as a wrong one")
            rows.append(PairTokens(clean[i], corrupt[i], answers, wrong))
        except ValueError as problem:
            rows.append(None)
            problems[i] = str(problem)
    return rows, problems


def _seam(prompt: str, answer: str) -> tuple[str, str]:
    return prompt[-SEAM:], answer


def _answer_ids(
    tokenizer: Tokenizer, pairs: Sequence[Pair], prompt_ids: list[list[int]]
) -> dict[tuple[str, str], list[int] | None]:
    """Ids of every answer and wrong answer, looked up once per seam (see SEAM)."""
    first: dict[tuple[str, str], int] = {}
    for i, pair in enumerate(pairs):
        for answer in pair.answers + pair.wrong:
            first.setdefault(_seam(pair.clean, answer), i)
    where = list(first.values())
    added = continuations(
        tokenizer, [pairs[i].clean for i in where], [prompt_ids[i] for i in where], [seam[1] for seam in first]
    )
    return dict(zip(first, added, strict=True))


def _check_alignment(pair: Pair, clean: list[int], corrupt: list[int]) -> None:
    if not clean:
        raise ValueError("the clean prompt is empty")
    if not pair.answers or not pair.wrong:
        raise ValueError(f"{pair.clean!r} needs at least one answer and one wrong answer")
    if len(clean) != len(corrupt):
        raise ValueError(
            f"clean and corrupt prompt must have the same number of tokens, and {pair.clean!r} has {len(clean)}, "
            f"{pair.corrupt!r} has {len(corrupt)}"
        )
    if clean == corrupt:
        raise ValueError(f"clean and corrupt prompt are the same: {pair.clean!r}")


def _one_token(prompt: str, answer: str, ids: list[int] | None) -> int:
    if ids is None:
        raise ValueError(
            f"{answer!r} after {prompt!r} changes the prompt's own tokens: a word that follows begins with a space, "
            f"and the prompt does not end with one"
        )
    if len(ids) != 1:
        raise ValueError(f"the answer {answer!r} to {prompt!r} is {len(ids)} tokens, and one is needed")
    return ids[0]
