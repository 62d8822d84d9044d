"""Prepares docstrings for the reference.

An ``Example:`` section of lines becomes a fenced block, and an argument that is described together with others, as in
``q, k, v: ...``, gets an entry of its own, so that the reference shows its type.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_INDENTED = r"((?:[ ]{4}.*(?:\n|$)|\n(?=[ ]{4}))+)"
_EXAMPLE = re.compile(rf"^Example:\n{_INDENTED}", re.MULTILINE)
_ARGUMENTS = re.compile(rf"^Arguments:\n{_INDENTED}", re.MULTILINE)
_TOGETHER = re.compile(r"^    (\w+(?:, \w+)+)(: .*(?:\n[ ]{8}.*)*)", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Changes the docstrings that the reference shows."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(separated(obj.docstring.value))


def fenced(docstring: str) -> str:
    """A docstring whose examples are fenced blocks of Python."""
    return _EXAMPLE.sub(_fence, docstring)


def separated(docstring: str) -> str:
    """A docstring in which every argument has an entry of its own."""
    return _ARGUMENTS.sub(lambda section: _TOGETHER.sub(_separate, section[0]), docstring)


def _separate(match: re.Match[str]) -> str:
    return "\n".join(f"    {name}{match[2]}" for name in match[1].split(", "))


def _fence(match: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in match[1].rstrip().splitlines()]
    code = "\n".join(lines).strip("`")
    return f"**Example:**\n\n```py\n{code}\n```\n"
