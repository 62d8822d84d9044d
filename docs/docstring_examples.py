"""Shows the examples of docstrings as code: an ``Example:`` section of lines becomes a fenced block."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:\n((?:[ ]{4}.*(?:\n|$)|\n(?=[ ]{4}))+)", re.MULTILINE)


class DocstringExamples(griffe.Extension):
    """Changes the docstrings that the reference shows."""

    def on_object(self, *, obj: griffe.Object, loader: griffe.GriffeLoader, **_: Any) -> None:
        """Called for every object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(docstring: str) -> str:
    """A docstring whose examples are fenced blocks of Python."""
    return _EXAMPLE.sub(_fence, docstring)


def _fence(match: re.Match[str]) -> str:
    lines = [line.removeprefix("    ") for line in match[1].rstrip().splitlines()]
    code = "\n".join(lines).strip("`")
    return f"**Example:**\n\n```py\n{code}\n```\n"
