"""Names and tokens as text in a figure.

They come from prompts, models and files, and are shown exactly as they are: a ``$`` does not start a formula, and
characters that cannot be seen or drawn (leading spaces, line ends, control characters, letters that the font lacks) are
written out.
"""

from __future__ import annotations

import functools
import re
import textwrap
from pathlib import Path

from matplotlib.font_manager import findfont, get_font

FONT = "DejaVu Sans"  # part of matplotlib, so a figure looks the same on every machine
_SYMBOLS = {"\n": "↵", "\r": "␍", "\t": "⇥"}
_CAPITALS = {"ioi": "IOI", "aba": "ABA", "abb": "ABB"}


def shown(text: str) -> str:
    """A text in one visible line: line ends and tabs as symbols, letters that cannot be drawn as ``\\u4f60``."""
    return "".join(_SYMBOLS.get(letter) or (letter if _drawable(letter) else _escaped(letter)) for letter in text)


def shown_token(token: str) -> str:
    """A token: like `shown`, with visible spaces at both ends. An empty token is shown as two quotes."""
    inner = token.strip(" ")
    front = len(token) - len(token.lstrip(" "))
    back = len(token) - front - len(inner)
    return "␣" * front + shown(inner) + "␣" * back or '""'


def wrapped(text: str, inches: float, size: float = 9) -> str:
    """A text in lines of at most this width. Arguments: the width in inches, the font size in points."""
    return "\n".join(textwrap.wrap(text, max(8, int(inches * 72 / (0.65 * size)))))


def task_title(name: str) -> str:
    """The name of a task as papers write it: "Greater Than" for ``greater-than``, "IOI Long" for ``ioi-long``.

    A name that has capital letters already is not changed. The extension of a file name is left out.
    """
    stem = Path(name).stem if name.endswith((".jsonl", ".json")) else name
    if stem != stem.lower():
        return shown(stem)
    return shown(" ".join(_CAPITALS.get(word, word.capitalize()) for word in re.split(r"[-_\s]+", stem) if word))


def _drawable(letter: str) -> bool:
    return letter.isprintable() and ord(letter) in _letters()


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "surrogatepass").decode()


@functools.cache
def _letters() -> frozenset[int]:
    return frozenset(get_font(findfont(FONT)).get_charmap())
