"""A TOML file that knows on which line each of its keys stands, so that a mistake can be pointed at."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from gatelens.errors import GatelensError

Keys = tuple[str | int, ...]
"""The way to a value: names of keys, and numbers for elements of lists."""


class Toml:
    """The parsed file, and the lines of its keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise GatelensError(f"cannot read the study {path}: {reason}. Give the path of a TOML file.") from error
        try:
            self.data: dict[str, Any] = tomllib.loads(self.text)
        except tomllib.TOMLDecodeError as error:
            what, at_line, at_column = _position(str(error), self.text)
            raise GatelensError(f"{path}, line {at_line}: this is no TOML: {what}{at_column}.") from error

    def line(self, *keys: str | int) -> int:
        """The line on which the value at these keys begins; that of the nearest enclosing one if it has none."""
        while keys:
            for first, last, data in self._prefixes:
                if _holds(data, keys):
                    return self._within(first, last, keys)
            keys = keys[:-1]
        return 1

    def mistake(self, message: str, *keys: str | int) -> GatelensError:
        """The error to raise about the value at these keys."""
        return GatelensError(f"{self.path}, line {self.line(*keys)}: {message}")

    def unknown(self, what: str, name: object, known: Iterable[str], *keys: str | int) -> GatelensError:
        """The error about a name that is none of the known ones, with the nearest of them."""
        names = list(known)
        close = difflib.get_close_matches(str(name), names, 1, cutoff=0.5)
        hint = f"did you mean '{close[0]}'? " if close else ""
        return self.mistake(f"no {what} '{name}': {hint}There are {', '.join(names) or 'none'}.", *keys)

    @cached_property
    def _lines(self) -> list[str]:
        return self.text.replace("\r\n", "\n").split("\n")  # what TOML takes for the end of a line, and nothing else

    @cached_property
    def _prefixes(self) -> list[tuple[int, int, dict[str, Any]]]:
        """Each statement's first and last line, and what the file says up to there.

        The parser tells no lines, but it can be given the file line by line: a prefix parses if and only if it ends
        between two statements, and a key stands in the first prefix that holds it.
        """
        lines = self._lines
        found: list[tuple[int, int, dict[str, Any]]] = []
        first = 1
        for last in range(1, len(lines) + 1):
            try:
                data = tomllib.loads("\n".join(lines[:last]))
            except tomllib.TOMLDecodeError:
                continue
            found.append((first, last, data))
            first = last + 1
        return found

    def _within(self, first: int, last: int, keys: Keys) -> int:
        """Of a list over several lines, the one with the element itself, if it is a text to look for."""
        value = _get(self.data, keys)
        if first == last or not isinstance(value, str) or not isinstance(keys[-1], int):
            return first
        earlier = _get(self.data, keys[:-1])[: keys[-1]].count(value)
        lines = range(first, last + 1)
        found = [n for n in lines for _ in re.findall(rf"[\"']{re.escape(value)}[\"']", self._lines[n - 1])]
        return found[earlier] if earlier < len(found) else first


def _get(data: Any, keys: Keys) -> Any:
    for key in keys:
        data = data[key]
    return data


def _holds(data: Any, keys: Keys) -> bool:
    try:
        _get(data, keys)
    except (KeyError, IndexError, TypeError):
        return False
    return True


def _position(message: str, text: str) -> tuple[str, int, str]:
    """What the parser says is wrong, the line, and the column in words."""
    what, _, _ = message.partition(" (at ")
    found = re.search(r"line (\d+), column (\d+)", message)
    if found is None:
        return what, max(1, len(text.splitlines())), ", at the end of the file"
    return what, int(found[1]), f", at column {found[2]}"
