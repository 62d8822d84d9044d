"""From text to token ids: tokenise prompts and answers, and check that they fit the tokenizer.

A prompt begins with the model's first token, if it has one (`gatelens.model.first_token`). The tokens of an answer are
those that follow the prompt's tokens when prompt and answer are tokenised *together*.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gatelens.errors import GatelensError
from gatelens.model.first_token import begin, first_tokens
from gatelens.tasks.token_roles import Span, roles_of_tokens, unmark

# The tokens of an answer depend only on the last characters of the prompt. Each answer is therefore tokenised once for
# all prompts that end with the same characters; this is how many characters are compared.
END_LENGTH = 8
# How vocabularies write a word with a leading space, and a word without it.
SPACED_WORD = re.compile("[Ġ▁][A-Za-z]{2,}")
BARE_WORD = re.compile("[A-Za-z]{2,}")


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that tasks use."""

    @property
    def all_special_ids(self) -> list[int]: ...
    @property
    def pad_token_id(self) -> int | None: ...
    def __call__(
        self, text: list[str], *, add_special_tokens: bool = ..., return_attention_mask: bool = ...
    ) -> Any: ...
    def decode(self, token_ids: Sequence[int]) -> str: ...
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Pair:
    """A prompt pair as text. Right and wrong answers follow the prompt directly, so most begin with a space."""

    clean: str
    corrupt: str
    answers: tuple[str, ...]
    wrong: tuple[str, ...]
    roles: tuple[Span, ...] = ()  # the parts of the clean prompt that have a role
    template: str = ""  # what the prompt was drawn from; empty: not known, or the same for all prompts


def marked_pair(clean: str, corrupt: str, answers: tuple[str, ...], wrong: tuple[str, ...], template: str = "") -> Pair:
    """A pair from prompts whose words with a role are marked (`gatelens.tasks.token_roles.mark`)."""
    text, roles = unmark(clean)
    return Pair(text, unmark(corrupt)[0], answers, wrong, roles, template)


@dataclass(frozen=True)
class PairTokens:
    """A prompt pair as token ids. Every right and every wrong answer is one token."""

    clean: list[int]
    corrupt: list[int]
    answers: list[int]
    wrong: list[int]
    roles: list[str] = field(default_factory=list)  # of each position, "" where the task names none; empty: no roles

    def __len__(self) -> int:
        return len(self.clean)


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The token ids of each text, with the model's first token, computed in one call of the tokenizer."""
    if not texts:
        return []
    first = first_tokens(tokenizer)
    ids: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"]
    return [begin(text_ids, first) for text_ids in ids]


def continuations(
    tokenizer: Tokenizer, prompts: Sequence[str], prompt_ids: Sequence[list[int]], answers: Sequence[str]
) -> list[list[int] | None]:
    """The token ids that each answer adds to its prompt; None if the answer changes the prompt's own tokens."""
    joint = encode(tokenizer, [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    return [
        ids[len(before) :] if ids[: len(before)] == before else None
        for before, ids in zip(prompt_ids, joint, strict=True)
    ]


def single_tokens(tokenizer: Tokenizer, words: Sequence[str], label: str, least: int) -> list[str]:
    """The words that are one token after a space.

    Arguments:
        words: the words to try.
        label: what the words are, for the error: "names".
        least: raise an error if fewer words than this are one token.
    """
    before = encode(tokenizer, ["so"])[0]
    added = continuations(tokenizer, ["so"] * len(words), [before] * len(words), [f" {word}" for word in words])
    single = [word for word, ids in zip(words, added, strict=True) if ids is not None and len(ids) == 1]
    if len(single) < least:
        split = [word for word in words if word not in single]
        raise GatelensError(
            f"the task needs {least} {label} of one token each, and this tokenizer has {len(single)}. It splits "
            f"{', '.join(split[:8])}{' and others' if len(split) > 8 else ''}: choose a model with a larger vocabulary."
        )
    return single


def preferably_single(tokenizer: Tokenizer, words: Sequence[str]) -> list[str]:
    """The words that are one token after a space, or all words if fewer than half of them are.

    This is for words that are the same in the clean and the corrupt prompt: the two prompts then have the same length
    even if the tokenizer splits the words.
    """
    single = single_tokens(tokenizer, words, "words", least=0)
    return single if 2 * len(single) >= len(words) else list(words)


def word_tokens(tokenizer: Tokenizer, spaced: bool) -> list[int]:
    """The ids of all tokens that are a word with a leading space (`spaced`) or without it, in order.

    If the vocabulary has fewer than 50 of them (bytes, characters), these are all its tokens except special tokens.
    """
    form = SPACED_WORD if spaced else BARE_WORD
    special = set(tokenizer.all_special_ids)
    vocabulary = [(index, token) for token, index in tokenizer.get_vocab().items() if index not in special]
    plain = sorted(index for index, token in vocabulary if form.fullmatch(token))
    return plain if len(plain) >= 50 else sorted(index for index, _ in vocabulary)


def tokenise(tokenizer: Tokenizer, pairs: Sequence[Pair]) -> tuple[list[PairTokens | None], dict[int, str]]:
    """Tokenise and check prompt pairs.

    Returns:
        The token ids of each pair, or None if the pair does not fit the tokenizer; and for each such pair, index ->
        what is wrong with it.
    """
    clean = encode(tokenizer, [pair.clean for pair in pairs])
    corrupt = encode(tokenizer, [pair.corrupt for pair in pairs])
    answer_ids = _answer_ids(tokenizer, pairs, clean)
    roles = roles_of_tokens(tokenizer, [pair.clean for pair in pairs], clean, [pair.roles for pair in pairs])
    tokens: list[PairTokens | None] = []
    problems: dict[int, str] = {}
    for i, pair in enumerate(pairs):
        try:
            _check_alignment(pair, clean[i], corrupt[i])
            answers, wrong = (
                [_one_token(pair.clean, text, answer_ids[_key(pair.clean, text)]) for text in texts]
                for texts in (pair.answers, pair.wrong)
            )
            if set(answers) & set(wrong):
                raise ValueError(f"a right answer to {pair.clean!r} is the same token as a wrong answer")
            tokens.append(PairTokens(clean[i], corrupt[i], answers, wrong, roles[i]))
        except ValueError as problem:
            tokens.append(None)
            problems[i] = str(problem)
    return tokens, problems


def _key(prompt: str, answer: str) -> tuple[str, str]:
    return prompt[-END_LENGTH:], answer


def _answer_ids(
    tokenizer: Tokenizer, pairs: Sequence[Pair], prompt_ids: list[list[int]]
) -> dict[tuple[str, str], list[int] | None]:
    """The token ids of all right and wrong answers, by `_key`; None if an answer changes the prompt's own tokens."""
    first: dict[tuple[str, str], int] = {}
    for i, pair in enumerate(pairs):
        for answer in pair.answers + pair.wrong:
            first.setdefault(_key(pair.clean, answer), i)
    prompts = list(first.values())
    added = continuations(
        tokenizer, [pairs[i].clean for i in prompts], [prompt_ids[i] for i in prompts], [answer for _, answer in first]
    )
    return dict(zip(first, added, strict=True))


def _check_alignment(pair: Pair, clean: list[int], corrupt: list[int]) -> None:
    if not clean:
        raise ValueError("the clean prompt is empty")
    if not pair.answers or not pair.wrong:
        raise ValueError(f"{pair.clean!r} needs at least one right answer and one wrong answer")
    if len(clean) != len(corrupt):
        raise ValueError(
            f"the clean and the corrupt prompt must have the same number of tokens, but {pair.clean!r} has "
            f"{len(clean)} and {pair.corrupt!r} has {len(corrupt)}"
        )
    if clean == corrupt:
        raise ValueError(f"the clean and the corrupt prompt are the same: {pair.clean!r}")


def _one_token(prompt: str, answer: str, ids: list[int] | None) -> int:
    if ids is None:
        raise ValueError(
            f"{answer!r} after {prompt!r} changes the prompt's own tokens: an answer that is a word must begin with a "
            f"space, and the prompt must not end with one"
        )
    if len(ids) != 1:
        raise ValueError(f"the answer {answer!r} to {prompt!r} has {len(ids)} tokens, but an answer must be one token")
    return ids[0]
