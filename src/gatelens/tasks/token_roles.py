"""The roles of tokens: what each token of a prompt is for the task (IO, S1, S2, ...).

A task marks words while it writes its prompts (`mark`), and `marked_pair` turns the marks into character spans. After
tokenisation every position of every prompt has exactly one role. The first position, where heads rest that have nothing
to look up, is `FIRST`, and the last position, where the answer is predicted, is `LAST`. Every other position has the
role that the task names or, if it names none, `PREVIOUS` (the position before the last) or `OTHER`. With roles, prompts
of different lengths can be compared, and positions can be summed by what they mean. The corrupt prompt is aligned with
the clean one, so the roles hold for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

FIRST = "first token"
LAST = "last token"
PREVIOUS = "previous token"
OTHER = "other"
# A word with a role is written between these characters of the private-use area, which no prompt of a task contains.
_OPEN, _BETWEEN, _CLOSE = "\ue000", "\ue001", "\ue002"


class Span(NamedTuple):
    """A part of a clean prompt that has a role: characters ``start`` to ``end``, without the latter."""

    role: str
    start: int
    end: int
    following: str = ""  # the role of the token after this part, if that token has no role of its own


@dataclass(frozen=True, eq=False)
class TokenRoles:
    """The role of every position of every prompt.

    Arguments:
        names: the names of the roles, in the order in which they first appear.
        ids: (prompt, position) int64, numbers of names; -1 behind the end of a shorter prompt.
    """

    names: tuple[str, ...] = ()
    ids: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))

    @property
    def are_named(self) -> bool:
        """Whether the task names at least one role: the others only say where in the prompt a position is."""
        return not set(self.names) <= {FIRST, LAST, PREVIOUS, OTHER}

    def renamed(self, names: tuple[str, ...]) -> TokenRoles:
        """The same roles, numbered as in other names, which contain all of these."""
        numbers = torch.tensor([names.index(name) for name in self.names] + [-1], dtype=torch.int64)
        return TokenRoles(names, numbers[self.ids])

    def sees(self) -> Tensor:
        """Which roles can look at which: bool (role, other role).

        True if, in at least one prompt, a position of the other role is at or before a position of the role.
        """
        n_roles, length = len(self.names), self.ids.shape[1]
        has = torch.nn.functional.one_hot(self.ids + 1, n_roles + 1)[..., 1:].bool()  # (prompt, position, role)
        places = torch.arange(length)[:, None]
        first, last = places.where(has, length).amin(1), places.where(has, -1).amax(1)  # (prompt, role)
        return (first[:, None, :] <= last[:, :, None]).any(0)


def share_names(all_roles: Sequence[TokenRoles]) -> list[TokenRoles]:
    """The roles of several tasks with one list of names, so that a number means the same role in all of them."""
    names = tuple(dict.fromkeys(name for roles in all_roles for name in roles.names))
    return [roles.renamed(names) for roles in all_roles]


def mark(word: str, role: str, following: str = "") -> str:
    """Write a word of a prompt together with its role and, if it matters, the role of the token after it."""
    return f"{_OPEN}{role}{_BETWEEN}{following}{_BETWEEN}{word}{_CLOSE}"


def unmark(text: str) -> tuple[str, tuple[Span, ...]]:
    """Take the marks off a text.

    Returns:
        The plain text, and the span of each marked word in it.

    Example:
        >>> unmark(f"After {mark('Mary', 'IO')} left")
        ('After Mary left', (Span(role='IO', start=6, end=10, following=''),))
    """
    plain, *marked = text.split(_OPEN)
    spans: list[Span] = []
    for part in marked:
        role, following, rest = part.split(_BETWEEN)
        word, _, after = rest.partition(_CLOSE)
        spans.append(Span(role, len(plain), len(plain) + len(word), following))
        plain += word + after
    return plain, tuple(spans)


def roles_of_tokens(
    tokenizer: Any, texts: Sequence[str], ids: Sequence[list[int]], spans: Sequence[Sequence[Span]]
) -> list[list[str]]:
    """The role of each token of each text; empty where no span names one.

    A token has the role of the span in which its first visible character lies. A tokenizer that cannot say where its
    tokens lie in the text gives no roles.

    Arguments:
        ids: the token ids of the texts. They may begin with tokens that are not part of the text.
        spans: the spans of each text.
    """
    named = [["" for _ in tokens] for tokens in ids]
    which = [i for i, of_text in enumerate(spans) if of_text]
    if not which or not getattr(tokenizer, "is_fast", False):
        return named
    encoded = tokenizer(
        [texts[i] for i in which], add_special_tokens=False, return_attention_mask=False, return_offsets_mapping=True
    )
    for i, own_ids, offsets in zip(which, encoded["input_ids"], encoded["offset_mapping"], strict=True):
        added = len(ids[i]) - len(own_ids)  # the first token of the model
        if added < 0 or ids[i][added:] != own_ids:
            continue
        before = None  # the span of the token before
        for position, (start, end) in enumerate(offsets, start=added):
            token = texts[i][start:end]
            first_visible = start + (len(token) - len(token.lstrip()) if token.strip() else 0)
            span = next((span for span in spans[i] if span.start <= first_visible < min(span.end, end)), None)
            if span is not None:
                named[i][position] = span.role
            elif before is not None:
                named[i][position] = before.following
            before = span
    return named


def token_roles(named: Sequence[Sequence[str]]) -> TokenRoles:
    """Give every position a role and number the roles.

    Arguments:
        named: the role of each position of each prompt; empty where the task names none.
    """
    complete = [_complete(roles) for roles in named]
    names = tuple(dict.fromkeys(role for roles in complete for role in roles))
    number = {name: i for i, name in enumerate(names)}
    longest = max(map(len, complete), default=0)
    ids = [[number[role] for role in roles] + [-1] * (longest - len(roles)) for roles in complete]
    return TokenRoles(names, torch.tensor(ids, dtype=torch.int64).reshape(len(complete), longest))


def _complete(roles: Sequence[str]) -> list[str]:
    """Give every position a role: by its place in the prompt if the task does not name one."""
    complete = [role or OTHER for role in roles]
    if len(complete) > 1:
        complete[-2] = roles[-2] or PREVIOUS
        complete[0] = FIRST
    complete[-1:] = [LAST]
    return complete
